"""Imports follow the layer order, each heavy dependency has one home, and only upstream.py modifies hosts."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "verl_qerl"

# A module may import its own layer and any layer to its left.
LAYERS = [
    "errors",
    "upstream",
    "formats",
    "checkpoints",
    "algos",
    "options",
    "planning",
    "kernels",
    "modules",
    "vllm_plugin",
    "verl_plugin",
    "cli",
]

# Folders of a layer, in its own order. What lies beside them in the layer may import all of them.
ROOMS = {
    "vllm_plugin": ["weights", "adapter", "noise", "decode"],
    "verl_plugin": ["config", "weight_sync", "actor", "rollout", "trainer"],
}

# The only layers that may import a dependency, anywhere in the file.
HOMES = {
    "triton": {"kernels"},
    "compressed_tensors": {"formats"},
    "safetensors": {"checkpoints"},
    "peft": {"modules", "verl_plugin"},
    "transformers": {"modules", "verl_plugin", "cli"},
    "vllm": {"vllm_plugin"},
    "verl": {"verl_plugin"},
    "ray": {"verl_plugin"},
    "hydra": {"verl_plugin"},
    "omegaconf": {"verl_plugin"},
}

# What the files outside the layers may import, by top-level name.
ENTRY_FILES = {
    "__init__.py": set(),
    "__main__.py": {"sys", "verl_qerl"},
    "hydra_plugin.py": {"hydra"},
}
CONFIG = PACKAGE / "config"
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if str(path.relative_to(PACKAGE)) not in ENTRY_FILES and CONFIG not in path.parents
]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: use absolute imports"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "verl_qerl"}
    return names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports(path):
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert layer in LAYERS, f"{layer} is not a layer; layers are {' < '.join(LAYERS)}"
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], "__version__"}
    for name in imported_modules(path):
        top, _, rest = name.partition(".")
        assert layer in HOMES.get(top, {layer}), f"{layer} may not import {top}; only {sorted(HOMES[top])} may"
        if top == "verl_qerl" and rest:
            assert rest.split(".")[0] in allowed, f"{layer} may not import {name}: layers are {' < '.join(LAYERS)}"


@pytest.mark.parametrize("path", [path for path in FILES if path.relative_to(PACKAGE).parts[0] in ROOMS], ids=name_of)
def test_imports_within_a_layer(path):
    layer, room = path.relative_to(PACKAGE).parts[:2]
    rooms = ROOMS[layer]
    if room not in rooms:
        return
    allowed = rooms[: rooms.index(room) + 1]
    for name in imported_modules(path):
        _, _, rest = name.partition(f"verl_qerl.{layer}.")
        entered = rest.split(".")[0]
        assert entered not in rooms or entered in allowed, (
            f"{layer}/{room} may not import {name}: its folders are {' < '.join(rooms)}"
        )


@pytest.mark.parametrize("name", ENTRY_FILES)
def test_entry_files_import_next_to_nothing(name):
    tops = {module.partition(".")[0] for module in imported_modules(PACKAGE / name)}
    assert tops <= ENTRY_FILES[name], f"{name} may import only {sorted(ENTRY_FILES[name])}"


def test_every_layer_exists():
    missing = [layer for layer in LAYERS if not ((PACKAGE / layer).is_dir() or (PACKAGE / f"{layer}.py").is_file())]
    assert not missing, f"LAYERS names what is not there: {missing}"


def test_config_holds_only_yaml():
    files = [path for path in CONFIG.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    code = [path for path in files if path.suffix != ".yaml"]
    assert code == [CONFIG / "__init__.py"], f"config/ holds YAML and an empty __init__.py, not {code}"
    assert code[0].read_text() == "", "config/__init__.py only makes the folder a package for Hydra's pkg:// paths"


# Attributes of ours on objects of a host displace nothing of it.
OUR_PREFIXES = ("qerl_", "_qerl_", "verl_qerl_")
# The numbers of a tensor, and the frames of an error.
CONTENTS = {"data", "__traceback__"}
# vLLM hands them a layer to put its weights in.
FILLS_A_LAYER = {"create_weights", "process_weights_after_loading", "hold_repacked"}


def is_ours(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "verl_qerl" or top in sys.stdlib_module_names


def our_imports(tree: ast.Module) -> set[str]:
    """Names that imports bind to something of verl_qerl or the standard library."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names if node.module != "typing"}
    return names


def root_name(node: ast.AST | None) -> str:
    """`a` of the expressions `a.b.c`, `a.b[c]` and `a.b | None`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.BinOp):
        node = node.left if isinstance(node, ast.BinOp) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def makes_an_object(value: ast.AST | None) -> bool:
    """Whether an expression is a call of a class, a copy, or an object whose class is one of ours from there on."""
    if not isinstance(value, ast.Call):
        return False
    func = value.func
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name.lstrip("_")[:1].isupper() or name in ("copy", "deepcopy", "swap_class")


class ForeignWrites(ast.NodeVisitor):
    """Lines that write an attribute of a host: of its modules, classes and functions, and of objects that came from it.

    An object counts as ours where the function made it by calling a class, copied it, or says by an annotation that it
    is of a class of ours or of the standard library.
    """

    def __init__(self, tree: ast.Module) -> None:
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self.imports, self.types = our_imports(tree), our_imports(tree) | classes
        self.constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        self.scopes: list[set[str]] = []
        self.functions: list[str] = []
        self.lines: list[int] = []
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        ours = {arg.arg for arg in every if root_name(arg.annotation) in self.types or arg.arg == "ctx"}
        if node.name in FILLS_A_LAYER:
            ours.add("layer")
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                if root_name(inner.annotation) in self.types or makes_an_object(inner.value):
                    ours.add(inner.target.id)
            elif isinstance(inner, ast.Assign) and makes_an_object(inner.value):
                ours |= {target.id for target in inner.targets if isinstance(target, ast.Name)}
            elif (isinstance(inner, ast.ExceptHandler) and inner.name) or isinstance(inner, ast.ClassDef):
                ours.add(inner.name)
        self.scopes.append(ours)
        self.functions.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()
        self.functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def is_our_object(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return makes_an_object(node)
        if not isinstance(node, ast.Name):
            return False
        return node.id in ("self", "cls") or node.id in self.imports or any(node.id in scope for scope in self.scopes)

    def look(self, target: ast.AST, attribute: str, line: int) -> None:
        if not (attribute.startswith(OUR_PREFIXES) or attribute in CONTENTS or self.is_our_object(target)):
            self.lines.append(line)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self.look(node.value, node.attr, node.lineno)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        holder = node.value
        if isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(holder, ast.Attribute) and holder.attr == "__dict__":
                self.look(holder.value, "", node.lineno)
            elif isinstance(holder, ast.Call) and root_name(holder.func) == "vars" and holder.args:
                self.look(holder.args[0], "", node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("setattr", "delattr", "__setattr__", "__delattr__") and len(node.args) > 1:
            given = node.args[1]
            attribute = given.value if isinstance(given, ast.Constant) else self.constants.get(root_name(given))
            self.look(node.args[0], str(attribute or ""), node.lineno)
        self.generic_visit(node)


def foreign_writes(tree: ast.Module) -> list[int]:
    return sorted(ForeignWrites(tree).lines)


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "upstream.py"], ids=name_of)
def test_only_upstream_modifies_hosts(path):
    tree = parse(path)
    lines = foreign_writes(tree)
    assert not lines, (
        f"{name_of(path)} writes to what is not ours in lines {lines}. What changes a host goes through upstream.py,"
        " with a record in hosts.py; an attribute of our own is named qerl_...; what is ours is annotated so."
    )
    assert not any(name.startswith("unittest") for name in imported_modules(path)), "unittest.mock patches foreign code"


@pytest.mark.parametrize(
    "line",
    [
        "import verl.utils as u\nu.f = g",
        "from vllm import LLM\nLLM.generate = g",
        "import torch\nsetattr(torch.nn.Linear, 'forward', g)",
        "def f():\n    import verl\n    del verl.utils.config.f",
        "def f(norm):\n    norm.__class__ = Ours",
        "def f(worker: Any):\n    worker.load_model = g",
        "from typing import Any\ndef f(worker):\n    found: Any = worker\n    found.load_model = g",
        "def f(model):\n    for layer in model.modules():\n        layer.forward = g",
        "def f(runner):\n    del runner.load_model",
        "def f(engine, name):\n    setattr(engine, name, g)",
        "def f(engine):\n    delattr(engine, 'add_lora')",
        "def f(config):\n    object.__setattr__(config, 'target_modules', [])",
        "class A:\n    def f(self):\n        self._runner._prepare_inputs = g",
        "def f(buffer):\n    buffer.poll_interval, buffer.x = 1, 2",
        "def f(buffer):\n    vars(buffer)['sample'] = g",
        "def f(buffer):\n    buffer.__dict__['sample'] = g",
        "import vllm\ndef f(config: vllm.LoRAConfig):\n    config.target_modules = []",
    ],
)
def test_a_foreign_write_is_seen(line):
    assert foreign_writes(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.environ['A'] = 'b'",
        "import torch\ndef f():\n    layer = torch.nn.Linear(1, 1)\n    layer.weight = None",
        "class A:\n    def __init__(self):\n        self.x = 1\n        object.__setattr__(self, 'y', 1)",
        "from verl_qerl.modules import convert\nconvert.x = 1",
        "from verl_qerl.a import B\ndef f(b: B):\n    b.__class__ = C\n    b.x = 1",
        "from verl_qerl.a import B\ndef f(found):\n    b: B\n    for b in found:\n        b.x = 1",
        "import copy\ndef f(config):\n    config = copy.copy(config)\n    config.x = 1",
        "_OURS = 'verl_qerl_digests'\ndef f(model):\n    setattr(model, _OURS, 1)\n    model.qerl_plan = 1",
        "def f(change, head):\n    upstream.swap_class(change, head, Ours).fused = True",
        "def f(norm):\n    norm.weight.data = norm.weight.data.float()",
    ],
)
def test_our_own_writes_are_not_flagged(line):
    assert not foreign_writes(ast.parse(line))
