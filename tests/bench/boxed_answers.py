"""GSM8K questions for models that box their answers, and whether an answer is right, by math-verify."""

import functools
import json
from pathlib import Path
from typing import Any

from verl_qerl.cli.data import MATH_INSTRUCTION
from verl_qerl.cli.eval.answers import boxed, same

__all__ = ["boxed", "encode", "is_right", "read_questions"]


def read_questions(path: Path, count: int) -> tuple[list[str], list[str]]:
    """The first questions of a file of JSON lines in GSM8K's form, MATH_INSTRUCTION behind each, and their answers.

    Raises:
        ValueError: There are fewer.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    if len(rows) < count:
        raise ValueError(f"{path} has {len(rows)} questions, {count} are asked for. Ask for at most as many.")
    answers = [row["answer"].rpartition("####")[2].strip().replace(",", "") for row in rows]
    return [f"{row['question']} {MATH_INSTRUCTION}" for row in rows], answers


def encode(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Token ids of chats up to the assistant's turn."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return tokenizer(texts, add_special_tokens=False).input_ids


@functools.cache
def is_right(found: str, wanted: str) -> bool:
    """Whether what a box holds is the wanted number: units, currencies and ways to write it do not count."""
    return same(found, wanted)
