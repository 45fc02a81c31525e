"""Importing a layer brings in no more than the layer needs; each case runs in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, **env: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_USE_EXTERNAL")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def absent(*names: str) -> str:
    return f"import sys\nfor name in {names}: sys.modules[name] = None  # the import system raises ImportError for it\n"


def not_imported(*names: str) -> str:
    return f"found = [name for name in {names} if name in sys.modules]\nassert not found, 'it imports ' + str(found)\n"


@pytest.mark.parametrize("module", ["verl_qerl", "verl_qerl.errors", "verl_qerl.upstream", "verl_qerl.cli"])
def test_needs_no_torch(module):
    run(absent("torch", "verl", "vllm", "ray", "triton", "transformers") + f"import {module}")


def test_the_package_imports_nothing():
    run(
        "import sys\nbefore = set(sys.modules)\nimport verl_qerl\n"
        "new = set(sys.modules) - before - {'verl_qerl'}\nassert not new, new"
    )


def test_vllm_plugin_imports_only_the_standard_library():
    # vLLM logs and swallows an import error of a plugin.
    run(
        "import sys\nbefore = set(sys.modules)\nimport verl_qerl.vllm_plugin\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - {'verl_qerl'}\n"
        "foreign = new - sys.stdlib_module_names\nassert not foreign, foreign"
    )


def test_verl_plugin_imports_neither_vllm_nor_ray():
    run(
        absent("vllm", "ray")
        + "import verl_qerl.verl_plugin as plugin\nassert plugin.__file__, 'it has no __init__.py'"
    )


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_verl_plugin_does_not_resolve_the_platform():
    run(
        absent("vllm") + "import verl\nimport verl_qerl.verl_plugin\n"
        "from verl.plugin.platform import platform_manager\nassert platform_manager._current_platform is None\n",
        VERL_USE_EXTERNAL_MODULES="verl_qerl.verl_plugin",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )


def test_formats_and_checkpoints_need_neither_a_gpu_nor_the_hosts():
    files = [path for folder in ("formats", "checkpoints") for path in (ROOT / "verl_qerl" / folder).glob("[!_]*.py")]
    names = [f"verl_qerl.{path.parent.name}.{path.stem}" for path in sorted(files)]
    run(
        f"import importlib, sys\nimport torch\nfor name in {names}: importlib.import_module(name)\n"
        "assert not torch.cuda.is_initialized()\n"
        + not_imported("triton", "verl", "vllm", "ray", "transformers", "peft")
    )
