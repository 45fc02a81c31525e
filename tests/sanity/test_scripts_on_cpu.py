"""The programs that tests hand to `run_script`: most of them run on a GPU alone, where CI does not see a lost name."""

import ast
import importlib.util
from pathlib import Path

import pytest
from qerl_testing import __file__ as shared

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "tests" / "vllm_plugin", Path(shared).parent)  # what `run_script` has on its path
FILES = [file for file in sorted(FOLDERS[1].rglob("test_*.py")) if "run_script(" in file.read_text()]


def imported(source: str) -> set[tuple[str, str]]:
    """(module, name); the name is empty for a whole module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return found


def programs(file: Path) -> list[str]:
    texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and "\nimport " in text]


def own_file(module: str) -> Path | None:
    places = [folder.joinpath(*module.split(".")) for folder in FOLDERS]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def names(file: Path) -> set[str]:
    """What a module defines or imports, and the modules beside it where it is a package."""
    tree = ast.parse(file.read_text())
    found = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def test_there_are_programs():
    assert sum(len(programs(file)) for file in FILES) > 8


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_their_imports_are_there(file):
    for source in programs(file):
        for module, name in imported(source):
            found = own_file(module)
            assert found or importlib.util.find_spec(module.partition(".")[0]), f"there is no {module}"
            if found and name:
                assert name in names(found), f"{module} has no {name}"
