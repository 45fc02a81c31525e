"""Imports follow the layer order, each heavy dependency has one home, and only upstream.py modifies foreign code."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "verl_qerl"

# A module may import its own layer and any layer to its left.
LAYERS = [
    "errors",
    "upstream",
    "formats",
    "checkpoints",
    "testing",
    "algos",
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
    "transformers": {"testing", "modules", "verl_plugin", "cli"},
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


def foreign_names(tree: ast.Module) -> set[str]:
    """Names that imports bind to something outside verl_qerl."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module_and_alias = [(alias.name, alias) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module_and_alias = [(node.module, alias) for alias in node.names]
        else:
            continue
        for module, alias in module_and_alias:
            if module.partition(".")[0] != "verl_qerl":
                names.add(alias.asname or alias.name.partition(".")[0])
    return names


def root_name(node: ast.expr) -> str | None:
    """`a` of the expression `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def foreign_assignments(tree: ast.Module) -> list[int]:
    """Lines that set or delete an attribute of an imported module, class or function.

    An object made by foreign code and kept in a local name is not seen, so nothing is flagged without reason.
    """
    foreign = foreign_names(tree)
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            target = node.args[0]
        else:
            continue
        if root_name(target) in foreign:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "upstream.py"], ids=name_of)
def test_only_upstream_modifies_foreign_code(path):
    tree = parse(path)
    lines = foreign_assignments(tree)
    assert not lines, f"{name_of(path)} sets attributes of foreign code in lines {lines}; that is a Shim's work"
    assert not any(name.startswith("unittest") for name in imported_modules(path)), "unittest.mock patches foreign code"


@pytest.mark.parametrize(
    "line",
    [
        "import verl.utils as u\nu.f = g",
        "from vllm import LLM\nLLM.generate = g",
        "import torch\nsetattr(torch.nn.Linear, 'forward', g)",
        "def f():\n    import verl\n    del verl.utils.config.f",
    ],
)
def test_a_foreign_assignment_is_seen(line):
    assert foreign_assignments(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.environ['A'] = 'b'",
        "import torch\nlayer = torch.nn.Linear(1, 1)\nlayer.weight = None",
        "class A:\n    def __init__(self):\n        self.x = 1",
        "from verl_qerl.modules import convert\nconvert.x = 1",
    ],
)
def test_our_own_assignments_are_not_flagged(line):
    assert not foreign_assignments(ast.parse(line))
