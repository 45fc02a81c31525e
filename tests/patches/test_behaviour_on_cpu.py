"""Each patch is still needed (stock upstream fails), and the patch and its shim both work."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = ROOT / "patches"
PLUGINS = {"verl": "verl_plugin", "vllm": "vllm_plugin"}
SCRIPTS = sorted((HERE / "behaviour").glob("*.py"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)

FAILED = 3  # exit code for an assertion of the script itself; one inside upstream is another failure
RUN = f"""
import runpy, sys, traceback
try:
    runpy.run_path(sys.argv[1])
except AssertionError as error:
    traceback.print_exc()
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    sys.exit({FAILED} if raised_in == sys.argv[1] else 1)
"""
INSTALL = """
import named_vllm  # a shim of verl's rollout imports it
from verl_qerl.upstream import install
from verl_qerl.{plugin}.shims import SHIMS
for shim in [shim for shim in SHIMS if shim.patch == "{patch}"] or exit("no shim for {patch}"):
    assert install(shim) is {in_force}, "the shim is in force: " + str(not {in_force})
"""


def environment(first_on_path: Path | None = None) -> dict[str, str]:
    """Stock upstream: no plugin of ours, unless the setup code installs a shim."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = [str(first_on_path)] if first_on_path else []
    env = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    return env | {
        "PYTHONPATH": os.pathsep.join([*path, *inherited, str(ROOT)]),
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def run(warm_python) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script, after `setup`, in a process that imports upstream anew: as installed, or `first_on_path`."""

    def start(script: Path, *, setup: str = "", first_on_path: Path | None = None):
        # Not in the checkout: `python -c` puts the current folder first on the path.
        return warm_python("-c", setup + RUN, str(script), env=environment(first_on_path), cwd=HERE)

    return start


def overlay(package: str, patches: list[Path], root: Path, include: str) -> None:
    """Link the installed package into `root`, copy the files the patches touch, and apply them there."""
    (installed,) = importlib.util.find_spec(package).submodule_search_locations
    shutil.copytree(installed, root / package, copy_function=os.symlink)
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    for patch in patches:
        for name in re.findall(rf"^\+\+\+ b/({package}/.+)$", patch.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if (root / name).is_symlink():
                source = (root / name).resolve()
                (root / name).unlink()
                shutil.copy(source, root / name)
        subprocess.run(["git", "apply", f"--include={include}", str(patch)], cwd=root, env=env, check=True)


def patch_of(script: Path) -> tuple[str, str, Path]:
    package, number = script.stem.split("_")
    (patch,) = (PATCHES / package).glob(f"{number}-*.patch")
    return package, number, patch


def has_shim(patch: Path) -> bool:
    return "\nShim: none" not in patch.read_text(encoding="utf-8")


each_script_with_shim = pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if has_shim(patch_of(script)[2])], ids=lambda path: path.stem
)


@each_script
def test_stock_upstream_needs_the_patch(run, script):
    result = run(script)
    assert result.returncode != 0, f"{script.stem}: upstream behaves. Delete the patch, its shim and this script."
    assert result.returncode == FAILED, f"{script.stem} fails for another reason\n{result.stderr}"


@each_script
def test_the_patch_works(run, script, tmp_path):
    package, _, patch = patch_of(script)
    overlay(package, [patch], tmp_path, f"{package}/*")
    result = run(script, first_on_path=tmp_path)
    assert result.returncode == 0, result.stderr


@each_script_with_shim
def test_the_shim_works(run, script):
    package, number, _ = patch_of(script)
    setup = INSTALL.format(plugin=PLUGINS[package], patch=f"{package}/{number}", in_force=True)
    result = run(script, setup=setup)
    assert result.returncode == 0, result.stderr


@each_script_with_shim
def test_the_shim_stands_down_where_the_patch_is(run, script, tmp_path):
    package, number, patch = patch_of(script)
    overlay(package, [patch], tmp_path, f"{package}/*")
    in_force = script.stem == "verl_0007"  # which also decides whether a run is ours (verl_plugin/driver.py)
    setup = INSTALL.format(plugin=PLUGINS[package], patch=f"{package}/{number}", in_force=in_force)
    result = run(script, setup=setup, first_on_path=tmp_path)
    assert result.returncode == 0, result.stderr


def test_both_ends_of_our_weight_sync_meet_where_the_patch_is(run, tmp_path):
    overlay("verl", list(PATCHES.glob("verl/0013-*.patch")), tmp_path, "verl/*")
    result = run(ROOT / "tests" / "verl_plugin" / "weight_sync" / "server_adapter_cases.py", first_on_path=tmp_path)
    assert result.returncode == 0, result.stderr
    first, second = json.loads(result.stdout.splitlines()[-1])
    for what in ("ends", "base", "split"):
        assert first[what][0] == first[what][1] != second[what][0] == second[what][1]
    assert first["split"][0] == first["ends"][0]  # verl's own name is ours


@pytest.mark.parametrize("package", sorted(path.name for path in PATCHES.iterdir() if path.is_dir()))
def test_upstream_tests_in_the_patches_pass(warm_python, package, tmp_path):
    series = sorted((PATCHES / package).glob("*.patch"))
    overlay(package, series, tmp_path / "upstream", "*")
    # Apart from the package, which the folder of a test's root would put on the path a second time.
    (tmp_path / "upstream" / "tests").rename(tmp_path / "upstream_tests")
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    env = environment(tmp_path / "upstream")
    result = warm_python("-m", "pytest", *options, "upstream_tests", env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    assert " passed" in result.stdout
