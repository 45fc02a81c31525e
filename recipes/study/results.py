"""Result files of the study: a session each, which add up."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

KEYS = {"arm", "tag", "task", "seed", "state", "gpu", "options", "metrics", "validation"}  # of a run
REMEDY = "Whole files of run.py are accepted. Copy it again, or remove it."
RUN = re.compile(r"[a-z0-9_.-]+-seed[0-9]+")  # <arm>[.<tag>]-<task>-seed<k>


def write(path: Path, content: dict[str, Any]) -> None:
    """The old file or the new one lies there at any time; lists of numbers have a line each."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    new = path.with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def merged(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """All runs by name; of one that comes several times, what is done, or has the most steps.

    Returns:
        Name -> run, with its `name` and `session`.

    Raises:
        ValueError: See `every`, or runs differ, see `check_same_options`.
    """
    made = every(folders)
    check_same_options([run for runs in made.values() for run in runs])  # those too that are left out
    return {name: max(runs, key=_worth) for name, runs in sorted(made.items())}


def every(folders: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """All runs by name, each as often as it was made, in the order of the files.

    Returns:
        Name -> runs, each with its `name` and `session`.

    Raises:
        ValueError: A file is no result of the study.
    """
    made: dict[str, list[dict[str, Any]]] = {}
    files = [path for folder in dict.fromkeys(folder.resolve() for folder in folders) for path in folder.glob("*.json")]
    for path in sorted(files):
        content = None
        with contextlib.suppress(ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
        held = [content.get(key) if isinstance(content, dict) else None for key in ("session", "runs")]
        if not all(isinstance(part, dict) for part in held):
            raise ValueError(f"no result of the study: {path} has no session or runs. {REMEDY}")
        for name, run in content["runs"].items():
            if lacking := sorted(KEYS - run.keys()):
                raise ValueError(f"no result of the study: {name} in {path} has no {', '.join(lacking)}. {REMEDY}")
            run |= {"name": name, "session": content["session"] | {"file": path.name}}
            made.setdefault(name, []).append(run)
    return made


def arm_of(run: dict[str, Any]) -> str:
    """Its arm, with the tag."""
    return f"{run['arm']}.{run['tag']}" if run["tag"] else run["arm"]


def check_same_options(runs: Sequence[dict[str, Any]]) -> None:
    """Runs of one arm and task stand for one set of options, and all for one model.

    Raises:
        ValueError: Two differ.
    """
    models = sorted({run["session"]["model"] for run in runs if "model" in run.get("session", ())})
    if len(models) > 1:
        raise ValueError(
            f"results of several models: {', '.join(models)}. One model is accepted, as runs are compared. Keep a"
            " folder of results for each."
        )
    options: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        first = options.setdefault((arm_of(run), run["task"]), run["options"])
        if first != run["options"]:
            differ = sorted(set(first) ^ set(run["options"]))
            raise ValueError(
                f"runs of {arm_of(run)} on {run['task']} differ in {', '.join(differ)}. One set of options for a name"
                " is accepted. Give the new runs a --tag, or leave the old files out."
            )


def _worth(run: dict[str, Any]) -> tuple[bool, int]:
    return run["state"] == "done", len(run["metrics"]["step"])
