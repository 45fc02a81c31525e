"""What re-quantization does to the log-probs of given prompts, by transformers."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.data import read_jsonl
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.reference import dequantize

Prompt = str | list[dict[str, str]]


def read_prompts(path: Path, count: int, columns: Sequence[str] = ("prompt",)) -> list[Prompt]:
    """The first `count` values of a column or key: text, or a chat as verl's parquet holds it.

    Args:
        path: Parquet or JSON lines.
        count: How many at most.
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


def log_prob_change(
    merged: Iterable[tuple[str, torch.Tensor]], quantized: Path, tokens: Sequence[Sequence[int]], device: str
) -> dict[str, Any]:
    """Compare the merged bf16 model with its quantized form, both dense in bf16, on the tokens of prompts.

    Args:
        merged: (name, tensor) of the bf16 model.
        quantized: Directory of the quantized one.
        tokens: From `tokenize`.
        device: Holds a whole bf16 model.

    Returns:
        Number of prompts and of tokens, mean and largest absolute change of a token's log-prob, and its mean with sign
        (quantized - merged).
    """
    model = empty_model(quantized)
    fill(model, merged)
    model.tie_weights()
    model.to(device)
    before = _log_probs(model, tokens, device)
    items = packed_stream(open_source(quantized), device=device)
    packed = (pair for pair in items if isinstance(pair[1], PackedWeight))
    fill(model, ((f"{name}.weight", dequantize(item)) for name, item in packed))  # type: ignore[arg-type]
    change = _log_probs(model, tokens, device) - before
    return {
        "prompts": len(tokens),
        "tokens": change.numel(),
        "mean_abs_change": change.abs().mean().item(),
        "max_abs_change": change.abs().max().item(),
        "mean_change": change.mean().item(),
    }


def _read_parquet(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        what = "a directory was given for a file" if path.is_dir() else "a file is missing"
        raise FileNotFoundError(f"{what}: prompts={path}. Parquet is accepted. Check the path.")
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


def empty_model(folder: Path) -> Any:
    """The dense bf16 model of transformers that a directory describes, without memory for its weights."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content.pop("quantization_config", None)
    config = AutoConfig.for_model(**content)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def fill(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Make tensors the parameters of their names."""
    for name, tensor in tensors:
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def _log_probs(model: Any, tokens: Sequence[Sequence[int]], device: str) -> torch.Tensor:
    """Of every token but the first of each prompt, float32 on the CPU."""
    found = []
    with torch.inference_mode():
        for prompt in tokens:
            ids = torch.tensor([prompt], device=device)
            log_probs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            found.append(log_probs.gather(1, ids[0, 1:, None]).squeeze(1).cpu())
    return torch.cat(found)
