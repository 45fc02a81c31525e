"""Which questions of a training set stay: none that comes twice, and none that is evaluated on.

Two questions are the same where they differ in case, white space, dollar signs and the punctuation at their end alone.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl_qerl.cli.eval.questions import TASKS, has_questions, read_questions

HELD_OUT = "--held-out"
HUB = "hub"


def plain(question: str) -> str:
    """A text that is the same for all ways to write a question that the module lists."""
    return re.sub(r"[\s$]", "", question).casefold().rstrip(".?!:;,")


def evaluation_questions(source: str | None) -> dict[str, list[str]]:
    """Questions of each task of `eval`.

    Args:
        source: `hub` for all tasks; a directory for those that it has, as of `eval --source`; None for none.

    Raises:
        ValueError: The directory has none, or the hub does not answer.
    """
    if source is None:
        return {}
    folder = None if source == HUB else Path(source)
    tasks = [task for task in TASKS if folder is None or has_questions(task, folder)]
    if not tasks:
        raise ValueError(
            f"no evaluation questions are found: {HELD_OUT}={source}. {HUB!r}, or a directory with TASK/test.jsonl,"
            f" .json or .parquet of {', '.join(TASKS)}, is accepted. Check the path."
        )
    return {task: [one.text for one in read_questions(task, folder, HELD_OUT)] for task in tasks}


def kept(questions: Iterable[str], held_out: Mapping[str, Iterable[str]]) -> list[int]:
    """Numbers of the questions that come first and are not held out; says how many are left out, and why.

    Args:
        held_out: Name of an evaluation set -> its questions. What several have counts for the first of them.

    Raises:
        ValueError: None is left.
    """
    sets = {name: {plain(one) for one in evaluated} for name, evaluated in held_out.items()}
    found, seen, twice, left_out = [], set(), 0, dict.fromkeys(sets, 0)
    for number, question in enumerate(questions):
        text = plain(question)
        reason = next((name for name, evaluated in sets.items() if text in evaluated), None)
        if reason is not None:
            left_out[reason] += 1
        elif text in seen:
            twice += 1
        else:
            found.append(number)
            seen.add(text)
    evaluated = ", ".join(f"{count} of {name}" for name, count in left_out.items() if count) or "none"
    print(f"train: left out are {twice} questions that come again, and of evaluation questions {evaluated}")
    if not found:
        raise ValueError(
            "no training question is left: all are held out. Questions that are not evaluated on are accepted. Choose"
            f" another --source or {HELD_OUT}."
        )
    return found
