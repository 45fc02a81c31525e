"""Update-Aware Quantization (QuRL, arXiv 2602.13953): an invariant scaling s > 1, folded in once before training.

    W x = (W / s) (s x),    s x by a norm of weight s n

for every linear that reads a norm: q, k, v after `input_layernorm`, gate and up after `post_attention_layernorm`. o and
down read no norm. Biases stay. q_norm and k_norm (Qwen3) come after the product, which does not change, so they change
nothing either.

A quantizer's step is proportional to the weight (where its scales have few bits, as those of mxfp4 and nvfp4, exactly
so for powers of two alone), so it shrinks by s, while an update of Adam keeps its size: update / step grows by s (under
SGD, whose gradient grows too, by s^2). That is what a larger learning rate does. Exactly, for
AdamW without clipping: the run with UAQ is the run without in which those linears have lr s, eps / s, weight decay / s,
and those norms lr / s, eps s, weight decay s (tests/bench/bench_uaq.py).

The inverse is W' s and n' / s. A model of bf16 that was scaled in float32 comes back bit for bit once it is rounded to
bf16 again, whatever s is: the two roundings in float32 are 2^16 times finer. In bf16 itself only a power of two, which
moves exponents alone, can be undone. It alone rounds nothing on the way there either: with s = 1.5, W / s has more
digits than bf16, so that a forward pass in bf16 rounds weights that it did not round before.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl_qerl.algos.options import SWITCH, Accepts, Options, is_number, option
from verl_qerl.checkpoints.record import read_whole, write_whole

RECORD = "verl_qerl_uaq.json"
MAX_SCALE = 16.0
# Norm of a decoder layer -> the linears that read it.
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_LINEARS = tuple(linear for linears in READERS.values() for linear in linears)
# What else a layer may hold without reading a norm that is scaled.
_UNTOUCHED = {f"{linear}.bias" for linear in (*_LINEARS, "self_attn.o_proj", "mlp.down_proj")}
_UNTOUCHED |= {
    f"{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj", "self_attn.q_norm", "self_attn.k_norm")
}
_IN_LAYER = re.compile(r"(.*\blayers\.\d+)\.(.+)")


@dataclass(frozen=True)
class UAQConfig(Options):
    """Options of Update-Aware Quantization.

    Attributes:
        scale: s in (1, MAX_SCALE]; the paper's is 1.5, and its 2 was worse than none. Powers of two round nothing.
    """

    NODE: ClassVar[str] = "uaq"

    enabled: bool = option(False, SWITCH)
    scale: float = option(
        1.5,
        Accepts(f"a number above 1 and at most {MAX_SCALE:g}", lambda v: is_number(v) and 1 < v <= MAX_SCALE),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", float(self.scale))


def is_power_of_two(scale: float) -> bool:
    """Whether multiplying and dividing by `scale` only moves the exponent."""
    return math.frexp(scale)[0] == 0.5


def scaled_parameters(names: Iterable[str]) -> dict[str, str]:
    """The parameters that UAQ scales.

    Args:
        names: All parameters of a model, as transformers names them.

    Returns:
        name -> `norm` or `linear`.

    Raises:
        ValueError: A decoder layer is not of the form x + attention(norm(x)), x + mlp(norm(x)) with the names of
            Qwen2, Qwen3, Llama and Mistral: scaling could change the function.
    """
    layers: dict[str, set[str]] = {}
    for name in names:
        found = _IN_LAYER.fullmatch(name)
        if found:
            layers.setdefault(found[1], set()).add(found[2])
    if not layers:
        raise ValueError(f"the model has no decoder layers. {_ACCEPTED}")
    wanted = {f"{norm}.weight": "norm" for norm in READERS} | {f"{linear}.weight": "linear" for linear in _LINEARS}
    for layer, held in layers.items():
        odd = sorted(held - wanted.keys() - _UNTOUCHED) or sorted(wanted.keys() - held)
        if odd:
            raise ValueError(
                f"UAQ does not know the layers of this model: {layer} has {'a' if odd[0] in held else 'no'}"
                f" {odd[0]!r}. {_ACCEPTED}"
            )
    return {f"{layer}.{leaf}": role for layer in layers for leaf, role in wanted.items()}


_ACCEPTED = (
    f"Accepted are layers with the norms {' and '.join(READERS)}, read by {', '.join(_LINEARS)} alone."
    " Leave out `+uaq.enabled=true`."
)


def fold_(role: str, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale a weight, [K] of a `norm` or [N, K] of a `linear`, in place: norms times s, linears divided by it."""
    return weight.mul_(scale) if role == "norm" else weight.div_(scale)


def unfold_(role: str, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """The inverse of `fold_`, in place."""
    return weight.div_(scale) if role == "norm" else weight.mul_(scale)


def norm_scale(module: str, scale: float) -> float:
    """What the weight of norm `module` (a module's name) was multiplied by: noise on it is to grow as much."""
    return scale if module.rpartition(".")[2] in READERS else 1.0


def write_record(folder: Path, scale: float | None, base: str) -> None:
    """Say beside a checkpoint that its weights are scaled; without a scale, that they are not.

    Write it before the weights: without it they pass for those of a run without UAQ.

    Args:
        folder: The checkpoint's folder; it is created if it is missing.
        base: model.path of the run.
    """
    if scale is None:
        (folder / RECORD).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECORD, {"scale": scale, "base": base})


def read_record(folder: Path) -> Mapping[str, Any] | None:
    """`scale` and `base` of a checkpoint's weights, None if they are not scaled; a CheckpointFormatError if damaged."""

    def make(found: Any) -> Mapping[str, Any]:
        UAQConfig(True, found["scale"])
        if not isinstance(found["base"], str):
            raise TypeError(f"base={found['base']!r}")
        return found

    return read_whole(folder / RECORD, make, "the record of UAQ", "Take another checkpoint.")
