"""What an evaluation leaves in its directory: settings.json, and TASK.jsonl with a question and its answers a line.

A line is written when the question is answered, so that an evaluation goes on where it was stopped.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.model_config import read_object
from verl_qerl.checkpoints.record import partial_of, write_whole
from verl_qerl.cli.eval.questions import TASKS, Question
from verl_qerl.cli.output_dir import full_disk_named

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Answer:
    """One of the answers to a question.

    Attributes:
        tokens: That it has, with the one that ends it.
    """

    text: str
    tokens: int
    cut: bool
    answer: str | None
    right: bool
    boxed: bool


@dataclass(frozen=True)
class Answered:
    """A line: number of the question in its set, the question, and its answers."""

    index: int
    question: Question
    answers: tuple[Answer, ...]

    @property
    def share(self) -> float:
        """The share of right answers."""
        return sum(answer.right for answer in self.answers) / len(self.answers)


def open_records(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the directory, or go on in one of the same settings, where last lines that were cut short are removed.

    Raises:
        ValueError: The directory has answers of other settings, or settings that are damaged.
        FileExistsError: It holds something that is no evaluation.
    """
    path = folder / SETTINGS
    if path.is_file() and (tasks := tasks_of(folder)):
        before = read_settings(folder)
        differing = [name for name in settings if before.get(name) != settings[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"an evaluation with other settings is in --out={folder}: {name} was"
                f" {before.get(name, 'not recorded')!r} and is now {settings[name]!r}. The same settings are accepted"
                " to go on. Choose another --out, or the settings of before."
            )
        for answers in (folder / f"{task}.jsonl" for task in tasks):
            os.truncate(answers, answers.read_bytes().rfind(b"\n") + 1)
        return
    is_ours = path.is_file() and read_settings(folder).keys() >= settings.keys()
    # A killed `write_whole` of the settings leaves a partial file.
    is_free = not folder.exists() or (folder.is_dir() and {*folder.iterdir()} <= {partial_of(path)})
    if not is_ours and not is_free:
        raise FileExistsError(
            f"the output already exists and is no evaluation: out={folder}. A new or empty directory, or one of `eval`,"
            " is accepted. Choose another."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, settings)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of an evaluation.

    Raises:
        FileNotFoundError: The directory is of none.
        CheckpointFormatError: The file is damaged.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(
            f"no evaluation is found: {folder} has no {SETTINGS}. The --out of `eval` is accepted. Check the path."
        )
    return read_object(path, "Choose another --out.")


def append(folder: Path, task: str, line: Answered) -> None:
    """Add a line, which is on the disk's way when this returns."""
    path = folder / f"{task}.jsonl"
    with full_disk_named(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read_lines(folder: Path, task: str) -> list[Answered]:
    """The questions answered so far, in the order of the set, without a last line that was cut short.

    Raises:
        ValueError: A line is damaged, or a question was answered twice.
    """
    path = folder / f"{task}.jsonl"
    if not path.is_file():
        return []
    found: dict[int, Answered] = {}
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            line = _line(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({type(error).__name__}). What `eval` wrote is accepted. Remove"
                " the line: its question is asked again."
            ) from error
        if line.index in found:
            raise ValueError(
                f"line {number} of {path} answers question {line.index} again. One line each is accepted: two"
                " evaluations may have written at once. Remove the line."
            )
        found[line.index] = line
    return [found[index] for index in sorted(found)]


def _line(row: Mapping[str, Any]) -> Answered:
    answers = tuple(Answer(**answer) for answer in row["answers"])
    if not answers:
        raise ValueError("no answers")
    return Answered(int(row["index"]), Question(**row["question"]), answers)


def check_questions(lines: Sequence[Answered], questions: Sequence[Question], where: str) -> None:
    """Require lines of these questions."""
    for line in lines:
        if line.index >= len(questions) or questions[line.index] != line.question:
            raise ValueError(
                f"{where} has another question {line.index} than this set: {line.question.text[:60]!r}. The same"
                " questions are accepted. Choose another --out, or the --source of before."
            )


def tasks_of(folder: Path) -> list[str]:
    """The tasks that a directory has lines of, in the order of TASKS."""
    return [task for task in TASKS if (folder / f"{task}.jsonl").is_file()]
