"""The question sets of `eval`: where they are, what a row may look like, and how a model is asked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_qerl.cli.data.rows import columns_of, from_hub, read_rows
from verl_qerl.cli.data.schema import GSM8K_SOURCE, MATH_INSTRUCTION, gsm8k_ground_truth, last_boxed

SLOT = "{question}"
PROMPT = f"{SLOT} {MATH_INSTRUCTION}"
SUFFIXES = ("jsonl", "json", "parquet")
# What the prompts of BytedTsinghua-SIA's sets (DAPO-Math-17k, AIME-2024) say around the question.
_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_AFTER = (MATH_INSTRUCTION, 'Remember to put your answer on its own line after "Answer:".')


@dataclass(frozen=True)
class Task:
    """A question set of the hub: its id, configuration, split, and number of questions as published."""

    hub: str
    config: str | None
    split: str
    count: int


TASKS = {
    "gsm8k": Task(GSM8K_SOURCE, "main", "test", 1319),
    "math500": Task("HuggingFaceH4/MATH-500", None, "test", 500),
    "aime24": Task("HuggingFaceH4/aime_2024", None, "train", 30),
    "aime25": Task("math-ai/aime25", None, "test", 30),
    "amc23": Task("math-ai/amc23", None, "test", 40),
}


@dataclass(frozen=True)
class Question:
    """A question and the inside of the box that answers it."""

    text: str
    truth: str


def parse_tasks(text: str) -> list[str]:
    """Names of TASKS, separated by commas; a ValueError if one is not among them, or there is none."""
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise ValueError(
            f"unknown task: --tasks={text}{f' with {unknown[0]}' if unknown else ''}. Accepted are"
            f" {', '.join(TASKS)}, separated by commas. Choose among them."
        )
    return names


def check_prompt(prompt: str) -> None:
    """Require a place for the question."""
    if SLOT not in prompt:
        raise ValueError(
            f"the prompt has no place for the question: --prompt={prompt!r}. Text with {SLOT} is accepted. Put it in."
        )


def read_questions(task: str, source: Path | None, option: str = "--source") -> list[Question]:
    """The questions of a task.

    Args:
        source: Directory with TASK/test.jsonl (or .json, .parquet) or TASK.jsonl; None for the hub.
        option: The option of the command that takes a directory, for messages.

    Raises:
        FileNotFoundError: The directory has no such file.
        ValueError: The file has no rows, a row lacks its question or answer, or the hub does not answer.
    """
    if source is None:
        found = TASKS[task]
        rows: Sequence[Mapping[str, Any]] = from_hub(found.hub, found.split, found.config, option)
        where = found.hub
    else:
        path = next((path for path in _candidates(task, source) if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"questions are missing: {task} in {option}={source}. {task}/test or {task} as .jsonl, .json or"
                f" .parquet is accepted. Check the directory, or leave {option} out for the hub."
            )
        rows, where = read_rows(path, "questions"), str(path)
    return [question_of(row, f"row {number} of {where}") for number, row in enumerate(rows, start=1)]


def has_questions(task: str, source: Path) -> bool:
    """Whether the directory has a file of the task."""
    return any(path.is_file() for path in _candidates(task, source))


def _candidates(task: str, source: Path) -> list[Path]:
    return [source / f"{name}.{suffix}" for name in (f"{task}/test", task) for suffix in SUFFIXES]


def question_of(row: Mapping[str, Any], where: str) -> Question:
    """A question from the hub's flat columns or from verl's schema; instructions around it are removed.

    Raises:
        ValueError: It lacks its question or answer; `where` names it.
    """
    extra, truth = columns_of(row.get("extra_info")), columns_of(row.get("reward_model")).get("ground_truth")
    nested = columns_of(truth)
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        prompt = columns_of(prompt[-1]).get("content")
    asked = (extra.get("question"), nested.get("question"), row.get("question"), row.get("problem"), prompt)
    text = next((one for one in asked if isinstance(one, str) and one.strip()), "").strip().removeprefix(_BEFORE)
    for instruction in _AFTER:
        text = text.strip().removesuffix(instruction)
    given = nested.get("target") if nested else truth
    answers = (given, row.get("answer"), row.get("solution"))
    answer = next((one for one in map(_text, answers) if one.strip()), "")
    found = Question(text.strip(), _truth(answer))
    if not found.text or not found.truth.strip():
        lacking, names = (
            ("answer", "answer or reward_model") if found.text else ("question", "question, problem or prompt")
        )
        raise ValueError(
            f"{where} has no {lacking}: its columns are {', '.join(row)}, its answer is {answer!r}. Text or a number in"
            f" {names} is accepted. Mend or drop the row, or rename the column."
        )
    return found


def _text(answer: Any) -> str:
    """Text or a finite number as text, 142.0 as 142; empty for all else."""
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else str(answer) if math.isfinite(answer) else ""
    return str(answer) if isinstance(answer, str | int) and not isinstance(answer, bool) else ""


def _truth(answer: str) -> str:
    """The inside of a box: what follows GSM8K's `####`, what a solution boxes, or the answer as it is."""
    if "####" in answer:
        return gsm8k_ground_truth(answer)
    return last_boxed(answer) if "\\boxed" in answer else answer.strip()
