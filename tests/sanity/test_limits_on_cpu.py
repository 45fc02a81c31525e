"""Sizes, docstrings, annotations, handlers, and what lies where in the tree."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl_qerl"
TOP_LEVEL = {"verl_qerl", "recipes", "patches", "tests", "pyproject.toml", "README.md", "LICENSE"}
MAX_LINES = 500
MAX_FUNCTION_LINES = 60

PYTHON = [path for folder in ("verl_qerl", "recipes", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", PYTHON, ids=name_of)
each_source = pytest.mark.parametrize("path", [path for path in PYTHON if PACKAGE in path.parents], ids=name_of)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Classes, and functions of modules and classes, with their dotted names; not what is defined inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from definitions(child, prefix)


def is_kernel(function: Function) -> bool:
    """A Triton kernel: its arguments are pointers and scalars that Triton types by itself."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def missing_annotations(function: Function, is_method: bool) -> list[str]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if is_method and not any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list):
        positional = positional[1:]
    every = [*positional, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    missing = [argument.arg for argument in every if argument.annotation is None]
    return missing if function.returns is not None else [*missing, "return"]


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    return lines - (function.body[0].end_lineno - function.body[0].lineno + 1)


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it takes every exception and does not raise it again."""
    if handler.type is None:
        kinds = ["BaseException"]
    else:
        kinds = [ast.unparse(kind) for kind in getattr(handler.type, "elts", [handler.type])]
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return bool({"Exception", "BaseException"} & set(kinds)) and not raises_again


def files_of_the_tree() -> list[Path]:
    """Tracked files and those that would be tracked."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"not a git checkout: {result.stderr.strip()}")
    paths = [ROOT / name for name in result.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]  # without what is deleted and not yet committed


def text_files() -> list[tuple[Path, str]]:
    contents = [(path, path.read_bytes()) for path in files_of_the_tree()]
    return [(path, content.decode()) for path, content in contents if b"\0" not in content]


@each_file
def test_file_is_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines, more than {MAX_LINES}. Split it by idea."


@each_source
def test_functions_are_short(path):
    functions = [(name, node) for name, node in definitions(parse(path)) if isinstance(node, Function)]
    long = {name: code_lines(node) for name, node in functions if code_lines(node) > MAX_FUNCTION_LINES}
    assert not long, f"more than {MAX_FUNCTION_LINES} lines without the docstring: {long}"


@each_source
def test_public_names_have_docstrings(path):
    public = [(name, node) for name, node in definitions(parse(path)) if not re.search(r"(^|\.)_", name)]
    bare = [name for name, node in public if ast.get_docstring(node) is None]
    assert not bare, f"no docstring: {bare}"


@each_source
def test_functions_are_annotated(path):
    bare = {}
    for name, node in definitions(parse(path)):
        if isinstance(node, Function) and not is_kernel(node):
            missing = missing_annotations(node, is_method="." in name)
            if missing:
                bare[name] = missing
    assert not bare, f"not annotated: {bare}"


@each_file
def test_no_broad_except(path):
    handlers = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler) and is_broad(node)]
    lines = [handler.lineno for handler in handlers]
    assert not lines, f"{name_of(path)} catches everything in lines {lines}. Name the type and the recovery."


def test_top_level_is_fixed():
    names = {path.relative_to(ROOT).parts[0] for path in files_of_the_tree()}
    extra = {name for name in names - TOP_LEVEL if not name.startswith(".")}
    assert not extra, f"the top level holds only {sorted(TOP_LEVEL)} and hidden files, not {sorted(extra)}"


def test_no_machine_paths():
    folders = "|".join(["work", "root", "opt", "home", "mnt", "Users", "private"])
    absolute = re.compile(rf"(?:^|[\s\"'`=:(,])/(?:{folders})(?:/|\b)", flags=re.MULTILINE)
    found = []
    for path, text in text_files():
        for match in absolute.finditer(text):
            line = text.count("\n", 0, match.start(0) + 1) + 1
            found.append(f"{name_of(path)}:{line}")
    assert not found, f"absolute paths of one machine: {found}"


def test_code_is_ascii():
    code = {".py", ".sh", ".yaml", ".toml", ".patch"}
    found = [name_of(path) for path, text in text_files() if path.suffix in code and not text.isascii()]
    assert not found, f"not ASCII: {found}"
