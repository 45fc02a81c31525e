"""What re-quantization does to the log-probs of given prompts, by transformers."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.dense_model import empty_model, fill
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.reference import dequantize


def log_prob_change(
    merged: Iterable[tuple[str, torch.Tensor]], quantized: Path, tokens: Sequence[Sequence[int]], device: str
) -> dict[str, Any]:
    """Compare the merged bf16 model with its quantized form, both dense in bf16, on the tokens of prompts.

    Args:
        merged: (name, tensor) of the bf16 model.
        quantized: Directory of the quantized one.
        tokens: Token ids of each prompt, from `prompts.tokenize`.
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
    fill(model, ((f"{name}.weight", dequantize(item)) for name, item in items if isinstance(item, PackedWeight)))
    change = _log_probs(model, tokens, device) - before
    return {
        "prompts": len(tokens),
        "tokens": change.numel(),
        "mean_abs_change": change.abs().mean().item(),
        "max_abs_change": change.abs().max().item(),
        "mean_change": change.mean().item(),
    }


def _log_probs(model: Any, tokens: Sequence[Sequence[int]], device: str) -> torch.Tensor:
    """Log-probs of every token but the first of each prompt, float32 on the CPU."""
    found = []
    with torch.inference_mode():
        for prompt in tokens:
            ids = torch.tensor([prompt], device=device)
            log_probs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            found.append(log_probs.gather(1, ids[0, 1:, None]).squeeze(1).cpu())
    return torch.cat(found)
