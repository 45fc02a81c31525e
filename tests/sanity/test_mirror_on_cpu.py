"""Folders of tests/ mirror those of verl_qerl/."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl_qerl"
TESTS = ROOT / "tests"

# Tests of what is no folder of the package.
OTHERS = {"bench", "e2e", "emulator", "patches", "recipes", "sanity", "startup"}


def folders(root: Path) -> set[str]:
    return {str(path.parent.relative_to(root)) for path in root.rglob("*.py")}


def test_every_folder_of_code_has_tests():
    code = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("[!_]*.py")}
    tested = {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    missing = sorted(code - tested)
    assert not missing, (
        f"no tests for {missing} of verl_qerl. Add a test file to the folder of the same name in tests/."
    )


def test_every_folder_of_tests_has_code():
    stray = {name for name in folders(TESTS) - folders(PACKAGE) if name.split("/")[0] not in OTHERS}
    assert not stray, f"tests/ has {sorted(stray)}, which verl_qerl has not. Move them."


def test_tests_are_no_package():
    # verl's wheel installs a package named `tests`; a package of ours could resolve to it, or the reverse.
    assert not list(TESTS.rglob("__init__.py"))
