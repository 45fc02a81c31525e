"""How much of the first updates of all weights reaches the log-probs of a quantized rollout; on a CPU.

    python tests/bench/bench_small_update.py --model DIR --questions gsm8k/train.jsonl --out FILE.json

QuRL's reason to scale weights (UAQ) is that an update is smaller than a step of the rollout's format. Here all weights
of a model take what Adam makes of its first updates: the learning rate times their number, with the sign of the
gradient, here that of solutions' log-probs. What these gain is asked with

    exact    the float32 weights, as FSDP keeps them
    bf16     those rounded to bf16, with which the actor computes and a stock rollout samples
    int8, fp8, nvfp4    linears quantized from bf16 as at every sync; INT8 and FP8 quantize inputs too, per token

each beside the same without an update. All else is float32, so it tells of no kernel. Questions that gave the gradient
are not those that are asked.
"""

from collections.abc import Iterator
from typing import Any

import torch
from first_updates import Text, learn, log_probs, of_tokens, rounded, run

from verl_qerl.formats import FORMATS, WeightFormat
from verl_qerl.formats.channel import ChannelFormat
from verl_qerl.formats.reference import dequantize

PACKED = ("int8", "fp8", "nvfp4")
KINDS = ("exact", "bf16", *PACKED)


def quantized(form: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 -> what the rollout's codes and scales stand for."""
    return dequantize(form.quantize(weight.bfloat16()), torch.float32)


def output(linear: Any, x: torch.Tensor, form: WeightFormat | None) -> torch.Tensor:
    """[..., K] -> [..., N], the input quantized per token where the format does that."""
    if isinstance(form, ChannelFormat):
        x = form.dequantize(form.quantize_rows(x.flatten(0, -2)), torch.float32).view_as(x)
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def measure(
    model: Any, learned: list[Text], asked: list[Text], updates: list[int], lr: float
) -> Iterator[dict[str, Any]]:
    """A row for each number of updates.

    Args:
        model: Causal language model, float32 with values of bf16.
        learned: Texts of the gradient.
        asked: Other texts.
        updates: Of Adam, all with the sign of this gradient.
    """
    learn(model, learned)
    weights = list(model.parameters())
    signs, starts = [], [weight.detach().bfloat16() for weight in weights]
    for weight in weights:
        assert weight.grad is not None
        signs.append(weight.grad.sign().to(torch.int8))
        weight.grad = None
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    linears = [one for name, one in linears.items() if name != "lm_head"]  # as in every format

    @torch.no_grad()
    def found(count: int, kind: str) -> list[float]:
        form = FORMATS[kind] if kind in PACKED else None
        for weight, start, sign in zip(weights, starts, signs, strict=True):
            changed = start.float() - lr * count * sign
            weight.copy_(changed if kind == "exact" else rounded(changed))
        for linear in linears:
            linear.forward = lambda x, linear=linear: output(linear, x, form)
            if form is not None:
                linear.weight.copy_(quantized(form, linear.weight))
        return [of_tokens(log_probs(model, text), text).mean().item() for text in asked]

    before = {kind: found(0, kind) for kind in KINDS}
    for count in updates:
        row: dict[str, Any] = {"updates": count, "tokens": sum(text[0].shape[1] - text[1] for text in asked)}
        row["gains"] = {kind: [b - a for a, b in zip(before[kind], found(count, kind), strict=True)] for kind in KINDS}
        exact = sum(row["gains"]["exact"])
        yield row | {"share_of_gain": {kind: sum(gains) / exact for kind, gains in row["gains"].items()}}


if __name__ == "__main__":
    run(__doc__, measure, texts=4, updates=(1, 4, 16), lr=1e-6)
