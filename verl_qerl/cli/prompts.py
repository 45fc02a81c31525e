"""Texts and chats in a file, and their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.source import Source
from verl_qerl.cli.data.rows import read_rows

Prompt = str | list[dict[str, str]]
COLUMNS = ("text", "prompt")
EMBEDDING = "model.embed_tokens.weight"


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """The first `count` values of a column or key: text, or a chat as verl's parquet holds it.

    Args:
        path: Parquet or JSON lines, whose first row has one of COLUMNS.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is neither parquet nor JSON lines, or has no prompts.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompts of an unknown kind: prompts={path}. .parquet and .jsonl are accepted. Convert it.")
    rows = read_rows(path, "prompts", count)
    column = next((name for name in COLUMNS if name in rows[0]), COLUMNS[0])
    for number, row in enumerate(rows, start=1):
        prompt = row.get(column)
        is_chat = isinstance(prompt, list) and all(isinstance(turn, dict) and "content" in turn for turn in prompt)
        if not prompt or not (isinstance(prompt, str) or is_chat):
            raise ValueError(
                f"row {number} of {path} cannot be used: {column}={prompt!r}. Text or a list of chat messages in"
                f" {' or '.join(f'`{name}`' for name in COLUMNS)} is accepted. Mend or drop the row."
            )
    return [row[column] for row in rows]


def tokenize(model: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        ValueError: See `load_tokenizer` and `token_ids`.
    """
    tokenizer = load_tokenizer(model, any(not isinstance(prompt, str) for prompt in prompts))
    return [token_ids(tokenizer, prompt) for prompt in prompts]


def tokens_of(source: Source, prompts: Sequence[Prompt], most: int) -> list[list[int]]:
    """`tokenize`, of each prompt at most `most` and as many as the model has positions; these are told where they cut.

    Raises:
        ValueError: See `tokenize`; config.json has no number of positions, or the embedding no row for a token.
    """
    positions = source.config.get("max_position_embeddings")
    if positions is not None and (not isinstance(positions, int) or positions < 2):
        raise ValueError(
            f"config.json has no number of positions: max_position_embeddings={positions!r} in {source.path}. A whole"
            " number above 1 is accepted. Mend the file."
        )
    tokens = tokenize(source.path, prompts)
    largest = max(map(max, filter(None, tokens)), default=0)
    if EMBEDDING in source.specs and largest >= (rows := source.specs[EMBEDDING].shape[0]):
        raise ValueError(
            f"the tokenizer is of another model: it gives token {largest}, the embedding of {source.path} has {rows}"
            " rows. Tokens below that are accepted. Copy the files of the model's own tokenizer there."
        )
    end = min(positions or most, most)
    if end == positions and (longer := sum(len(ids) > end for ids in tokens)):
        print(f"{longer} of {len(tokens)} texts are cut: the model has {positions} positions")
    return [ids[:end] for ids in tokens]


def load_tokenizer(model: str | Path, chats: bool) -> Any:
    """The tokenizer of a model.

    Raises:
        ValueError: The model has no tokenizer, a damaged one or a damaged config.json, or for chats the tokenizer no
            template.
    """
    from transformers import AutoTokenizer

    from verl_qerl.cli.odd_values import ODD_VALUES

    folder = Path(model)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        # From nothing, transformers makes a tokenizer without a vocabulary.
        raise ValueError(f"the model has no tokenizer: {model}. One is needed for prompts. Copy its files there.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except ODD_VALUES as error:
        raise ValueError(
            f"the tokenizer or config.json cannot be read: {model} ({error!r:.300}). Files as transformers saves them"
            " are accepted. Download them again."
        ) from error
    if chats and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer has no chat template: {model}. One is needed to ask as the model was trained. Copy"
            " chat_template.jinja of the instruction-tuned model there."
        )
    return tokenizer


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a text, or of a chat up to where the assistant begins, which may be refused (ValueError)."""
    from jinja2 import TemplateError

    try:
        if isinstance(prompt, str):
            return tokenizer(prompt)["input_ids"]
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the tokenizer refuses {prompt!r:.99} ({error}). Unicode text, and chats as its template knows them, are"
            " accepted. Mend the row."
        ) from error
