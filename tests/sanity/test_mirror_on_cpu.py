"""tests/ mirrors verl_qerl/: every source has a test, and every test in a mirrored folder has a source."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl_qerl"
TESTS = ROOT / "tests"

# shims.py is covered by tests/patches/, the others by what starts them; config/ holds no code.
EXEMPT = {"__init__", "__main__", "shims", "hydra_plugin"}
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem not in EXEMPT]
MIRRORED = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))} - {"config"}
TEST_FILES = [
    path
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.parent == TESTS or path.relative_to(TESTS).parts[0] in MIRRORED
]


def names_of(test: Path) -> set[str]:
    """Source stems that test_<stem>[_<what>][_on_cpu].py may stand for, e.g. {"a", "a_b"} for test_a_b_on_cpu.py."""
    parts = test.stem.removeprefix("test_").removesuffix("_on_cpu").split("_")
    return {"_".join(parts[:end]) for end in range(1, len(parts) + 1)}


def source_of(test: Path) -> Path | None:
    """The source with the longest fitting name; for test_<folder>.py the folder's __init__.py."""
    folder = PACKAGE / test.parent.relative_to(TESTS)
    fitting = [path for path in folder.glob("*.py") if path.stem in names_of(test)]
    if fitting:
        return max(fitting, key=lambda path: len(path.stem))
    init = folder / "__init__.py"
    return init if folder.name in names_of(test) and init.is_file() else None


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_source_has_a_test(source):
    folder = TESTS / source.parent.relative_to(PACKAGE)
    tests = [test for test in folder.glob("test_*.py") if source_of(test) == source]
    expected = folder.relative_to(ROOT) / f"test_{source.stem}_on_cpu.py"
    assert tests, f"{source.relative_to(ROOT)} has no test. Add {expected}."


@pytest.mark.parametrize("test", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_test_has_a_source(test):
    assert source_of(test), f"{test.relative_to(ROOT)} tests no file of verl_qerl. Rename or delete it."


def test_tests_are_no_package():
    # verl's wheel installs a package named `tests`; a package of ours could resolve to it, or the reverse.
    assert not list(TESTS.rglob("__init__.py"))
