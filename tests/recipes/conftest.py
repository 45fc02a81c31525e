import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `python3` prints its arguments, one a line, and fails for the module named in FAIL."""
    folder = tmp_path_factory.mktemp("bin")
    stub = folder / "python3"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "== end"\n[ "$2" != "$FAIL" ]\n')
    stub.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def study() -> Iterator[Callable[[str], ModuleType]]:
    """Gives the scripts of recipes/study by name; they import each other as what lies beside them."""
    folder = Path(__file__).resolve().parents[2] / "recipes" / "study"
    names = {path.stem for path in folder.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    yield importlib.import_module
    sys.path.remove(str(folder))
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


@pytest.fixture
def paired(study: Callable[[str], ModuleType]) -> ModuleType:
    return study("paired")


@pytest.fixture
def report(study: Callable[[str], ModuleType]) -> ModuleType:
    return study("report")
