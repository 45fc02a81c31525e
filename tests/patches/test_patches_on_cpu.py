"""Every patch is well formed, still applies to the pinned upstream, and is not upstream yet."""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
FIELDS = ("Base", "Kind", "Shim", "Test", "Forwarded", "Remove-when")
# verl: tests/special_sanity/check_pr_title.py of its repository. vLLM: the tags of its pull requests.
VERL_MODULES = (
    "fsdp megatron sglang vllm rollout trainer tests training_utils recipe hardware deployment ray worker "
    "single_controller misc docker ci perf model algo env tool ckpt doc data"
).replace(" ", "|")
SUBJECT = {
    "verl": rf"\[(?:{VERL_MODULES})(?:, (?:{VERL_MODULES}))*\] (?:feat|fix|refactor|chore|test): .+",
    "vllm": r"\[[A-Z][\w /-]*\].+",
}
ROW = re.compile(r"^\| ((?:verl|vllm)/\d{4}) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """One `git format-patch` file under patches/<package>/."""

    path: Path

    @property
    def package(self) -> str:
        return self.path.parent.name

    @property
    def message(self) -> str:
        return self.path.read_text(encoding="utf-8").split("\n---\n", 1)[0]

    @property
    def subject(self) -> str:
        subject = re.search(r"^Subject: \[PATCH[^]]*\] (.+(?:\n .+)*)", self.message, flags=re.MULTILINE)
        return subject[1].replace("\n", "")

    @property
    def fields(self) -> dict[str, str]:
        return dict(re.findall(r"^([A-Z][a-z-]+): (.+)$", self.message.split("\n\n", 1)[1], flags=re.MULTILINE))

    @property
    def package_files(self) -> list[str]:
        """Touched files the wheel ships; the patch's own upstream tests are not among them."""
        return re.findall(rf"^\+\+\+ b/({self.package}/.+)$", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)

    def __str__(self) -> str:
        return f"{self.package}/{self.path.name[:4]}"


ALL = [Patch(path) for path in sorted(PATCHES.glob("*/*.patch"))]
each_patch = pytest.mark.parametrize("patch", ALL, ids=str)


def copy_upstream(root: Path, *patches: Patch) -> Path:
    """Copy the files the patches touch out of the installed package."""
    for patch in patches:
        (installed,) = importlib.util.find_spec(patch.package).submodule_search_locations
        site = Path(installed).parent
        for name in patch.package_files:
            if not (root / name).exists() and (site / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(site / name, root / name)
    return root


def git_apply(patch: Patch, root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    # In a subdirectory of another work tree, `git apply` skips every file and exits 0. The ceiling hides that tree.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    command = ["git", "apply", f"--include={patch.package}/*", *flags, str(patch.path)]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_there_are_patches():
    assert ALL, f"no patch found under {PATCHES.name}/: every other test here would check nothing"


@each_patch
def test_is_ready_to_send(patch):
    assert re.fullmatch(SUBJECT[patch.package], patch.subject), (
        f"{patch}: {patch.subject!r} is no {patch.package} title"
    )
    assert not set(FIELDS) - set(patch.fields), f"{patch}: missing {set(FIELDS) - set(patch.fields)}"
    assert patch.fields["Kind"] in ("fix", "hook", "feature"), patch.fields["Kind"]
    assert re.fullmatch(r"no|https://github\.com/.+/pull/\d+", patch.fields["Forwarded"]), patch.fields["Forwarded"]
    script = patch.fields["Test"]
    assert script == f"tests/patches/behaviour/{patch.package}_{patch.path.name[:4]}.py"
    assert (ROOT / script).is_file(), f"{patch}: {script} not found"


@each_patch
def test_is_cut_from_the_pinned_release(patch):
    pin = f'{patch.package}(?:\\[[^]]*\\])?=={re.escape(patch.fields["Base"])}"'
    assert re.search(pin, (ROOT / "pyproject.toml").read_text()), f"{patch}: Base {patch.fields['Base']} is not the pin"


@each_patch
def test_names_its_shim_or_says_how_we_do_without(patch):
    shim = patch.fields["Shim"]
    if shim.startswith("none"):
        assert re.fullmatch(r"none: .+", shim), f"{patch}: say after `none:` what makes up for the patch"
    else:
        assert f'patch="{patch}"' in (ROOT / shim).read_text(), f"{patch}: {shim} has no shim for it"


@each_patch
def test_carries_an_upstream_test(patch):
    assert re.search(r"^\+\+\+ b/tests/.+\.py$", patch.path.read_text(), flags=re.MULTILINE), f"{patch} has no test"


@each_patch
def test_applies_to_pinned_upstream(patch, tmp_path):
    root = copy_upstream(tmp_path / "root", patch)
    before = {name: (root / name).read_text() for name in patch.package_files if (root / name).exists()}
    result = git_apply(patch, root)
    assert result.returncode == 0, f"{patch} no longer applies. Rebase it, or delete it.\n{result.stderr}"
    assert patch.package_files, f"{patch} touches no file of {patch.package}"
    for name in patch.package_files:
        after = (root / name).read_text()
        assert after != before.get(name), f"{patch}: {name} is unchanged"
        if name.endswith(".py"):
            compile(after, name, "exec")


@each_patch
def test_is_not_upstream_yet(patch, tmp_path):
    result = git_apply(patch, copy_upstream(tmp_path / "root", patch), "--reverse", "--check")
    assert result.returncode != 0, f"{patch} is in the installed {patch.package}. Delete it and its shim."


@pytest.mark.parametrize("package", sorted({patch.package for patch in ALL}))
def test_series_applies_in_order(package, tmp_path):
    series = [patch for patch in ALL if patch.package == package]
    root = copy_upstream(tmp_path / "root", *series)
    for patch in series:
        result = git_apply(patch, root)
        assert result.returncode == 0, f"{patch} conflicts with its predecessors\n{result.stderr}"


def test_readme_lists_exactly_the_patches():
    rows = {row[0]: row[1:] for row in ROW.findall((PATCHES / "README.md").read_text(encoding="utf-8"))}
    assert set(rows) == {str(patch) for patch in ALL}
    for patch in ALL:
        title, _, shim, forwarded, remove_when = rows[str(patch)]
        assert title == patch.subject
        assert shim.split(":")[0] == patch.fields["Shim"].split(":")[0]
        assert (forwarded, remove_when) == (patch.fields["Forwarded"], patch.fields["Remove-when"])
