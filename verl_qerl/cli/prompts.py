"""Prompts and other texts in a file, and their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_qerl.cli.data import check_file, read_jsonl

Prompt = str | list[dict[str, str]]


def read_prompts(path: Path, count: int, columns: Sequence[str] = ("prompt",)) -> list[Prompt]:
    """The first `count` values of a column or key: text, or a chat as verl's parquet holds it.

    Args:
        path: Parquet or JSON lines.
        columns: The first of them that the first row has is read.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is neither parquet nor JSON lines, or has no prompts.
    """
    if path.suffix == ".jsonl":
        rows = read_jsonl(path, {})
    elif path.suffix == ".parquet":
        rows = _read_parquet(path, columns)
    else:
        raise ValueError(f"prompts of an unknown kind: prompts={path}. .parquet and .jsonl are accepted. Convert it.")
    first = rows[0] if isinstance(rows[0], dict) else {}
    column = next((name for name in columns if name in first), columns[0])
    for number, row in enumerate(rows[:count], start=1):
        prompt = row.get(column) if isinstance(row, dict) else None
        is_chat = isinstance(prompt, list) and all(isinstance(turn, dict) and "content" in turn for turn in prompt)
        if not prompt or not (isinstance(prompt, str) or is_chat):
            raise ValueError(
                f"row {number} of {path} cannot be used: {column}={prompt!r}. Text or a list of chat messages in"
                f" {' or '.join(f'`{name}`' for name in columns)} is accepted. Mend or drop the row."
            )
    return [row[column] for row in rows[:count]]


def tokenize(model: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of the prompts that have two tokens or more; a chat ends where the assistant begins.

    Raises:
        ValueError: The model's directory holds no tokenizer, or no prompt has two tokens.
    """
    from transformers import AutoTokenizer

    if not any(model.glob("tokenizer*")):  # from nothing, transformers makes a tokenizer without a vocabulary
        raise ValueError(
            f"the model has no tokenizer: {model}. One is needed for prompts. Copy its files there, or leave prompts"
            " out."
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:  # whose template has its own special tokens
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > 1:
            tokens.append(ids)
    if not tokens:
        raise ValueError(
            "no prompt has two tokens: nothing can be compared. Longer prompts are accepted. Give another file."
        )
    return tokens


def _read_parquet(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_file(path, "prompts", "Parquet is")
    accepted = f"Parquet with a column {' or '.join(f'`{name}`' for name in columns)} is accepted. "
    try:
        held = [name for name in columns if name in pq.read_schema(path).names]
        rows = pq.read_table(path, columns=held[:1]).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(
            f"prompts cannot be read: prompts={path} ({error}). {accepted}Write it with `python -m verl_qerl data`."
        ) from error
    if not held or not rows:
        what = "a file holds no prompts" if held else "a file lacks a column"
        raise ValueError(f"{what}: prompts={path}. {accepted}Write it with `python -m verl_qerl data`.")
    return rows
