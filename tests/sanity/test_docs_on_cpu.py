"""What the READMEs tell a reader to run or open exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("patches", "recipes", "tests", "verl_qerl")
READMES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("README.md")))]
SCRIPT = re.compile(r"\b(?:bash|sh|python3?)[ \t]+(?:-[a-z]+[ \t]+)*([A-Za-z0-9_.][A-Za-z0-9_./-]*\.(?:sh|py))\b")
MODULE = re.compile(r"\bpython3? -m (verl_qerl(?:\.\w+)*)(?: ([a-z][a-z_]*))?")
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", flags=re.M)

each_readme = pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))


def read(readme: Path) -> str:
    if not readme.is_file():
        pytest.skip(f"{readme.relative_to(ROOT)} is not written yet")
    return readme.read_text(encoding="utf-8")


def linked(readme: Path) -> list[Path]:
    """The files and folders that a page links to."""
    targets = [link.partition("#")[0] for link in LINK.findall(read(readme)) if not re.match(r"[a-z]+:", link)]
    return [(readme.parent / target).resolve() for target in targets if target]


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
        files = (path / "cli" / f"{command}.py", path / "cli" / command / "__init__.py")
        is_command = module != "verl_qerl" or not command or any(file.is_file() for file in files)
        if not (is_module and is_command):
            missing.append(f"{module} {command}")
    assert not missing, f"{readme.relative_to(ROOT)} runs what is not in the package: {missing}"


@each_readme
def test_relative_links_resolve(readme):
    missing = [target for target in linked(readme) if not target.exists()]
    assert not missing, f"{readme.relative_to(ROOT)} links to what is not in the tree: {missing}"


@each_readme
def test_sections_that_are_linked_exist(readme):
    missing = []
    for link in LINK.findall(read(readme)):
        target, _, anchor = link.partition("#")
        if anchor and not re.match(r"[a-z]+:", link):
            page = readme.parent / target if target else readme
            if anchor not in {slug(heading) for heading in HEADING.findall(read(page))}:
                missing.append(link)
    assert not missing, f"{readme.relative_to(ROOT)} links to sections that do not exist: {missing}"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: links as their text, punctuation gone, spaces as hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def test_every_readme_is_reached_from_the_first():
    found, todo = set(), [READMES[0]]
    while todo:
        page = todo.pop()
        if page not in found and page.name == "README.md" and page.is_file():
            found.add(page)
            todo += linked(page)
    assert not (lost := set(READMES) - found), f"no page links to {sorted(map(str, lost))}"


def test_every_result_is_linked_from_somewhere():
    results = {path for folder in FOLDERS for path in ROOT.joinpath(folder).glob("**/results/**/*") if path.is_file()}
    assert results
    lost = results - {target for readme in READMES for target in linked(readme)}
    assert not lost, f"no README links to {sorted(map(str, lost))}"


def test_the_patterns_see_what_they_are_for():
    text = (
        "Run `bash recipes/a/run.sh`, then\n\n    python -u tools/x.py --a 1\n    python -m verl_qerl plot a\n[b](c.md)"
    )
    assert SCRIPT.findall(text) == ["recipes/a/run.sh", "tools/x.py"]
    assert MODULE.findall(text) == [("verl_qerl", "plot")]
    assert LINK.findall(text) == ["c.md"]
    assert slug("verl's rollout [correction](a.md), `x=1`") == "verls-rollout-correction-x1"
