"""What the READMEs tell a reader to run or open exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "patches" / "README.md", *sorted((ROOT / "recipes").rglob("README.md"))]
SCRIPT = re.compile(r"\b(?:bash|sh|python3?)[ \t]+(?:-[a-z]+[ \t]+)*([A-Za-z0-9_.][A-Za-z0-9_./-]*\.(?:sh|py))\b")
MODULE = re.compile(r"\bpython3? -m (verl_qerl(?:\.\w+)*)(?: ([a-z][a-z_]*))?")
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")

each_readme = pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))


def read(readme: Path) -> str:
    if not readme.is_file():
        pytest.skip(f"{readme.relative_to(ROOT)} is not written yet")
    return readme.read_text(encoding="utf-8")


@each_readme
def test_scripts_exist(readme):
    # From the root of the checkout, or from the README's own folder.
    names = SCRIPT.findall(read(readme))
    missing = [name for name in names if not ((ROOT / name).is_file() or (readme.parent / name).is_file())]
    assert not missing, f"{readme.relative_to(ROOT)} runs what is not in the tree: {missing}"


@each_readme
def test_commands_exist(readme):
    missing = []
    for module, command in MODULE.findall(read(readme)):
        path = ROOT.joinpath(*module.split("."))
        is_module = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        is_command = module != "verl_qerl" or not command or (path / "cli" / f"{command}.py").is_file()
        if not (is_module and is_command):
            missing.append(f"{module} {command}")
    assert not missing, f"{readme.relative_to(ROOT)} runs what is not in the package: {missing}"


@each_readme
def test_relative_links_resolve(readme):
    targets = [link.partition("#")[0] for link in LINK.findall(read(readme)) if not re.match(r"[a-z]+:", link)]
    missing = [target for target in targets if target and not (readme.parent / target).exists()]
    assert not missing, f"{readme.relative_to(ROOT)} links to what is not in the tree: {missing}"


def test_the_patterns_see_what_they_are_for():
    text = (
        "Run `bash recipes/a/run.sh`, then\n\n    python -u tools/x.py --a 1\n    python -m verl_qerl plot a\n[b](c.md)"
    )
    assert SCRIPT.findall(text) == ["recipes/a/run.sh", "tools/x.py"]
    assert MODULE.findall(text) == [("verl_qerl", "plot")]
    assert LINK.findall(text) == ["c.md"]
