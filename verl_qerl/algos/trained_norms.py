"""Norms that are trained beside an adapter: which they are, and what their parameter is called.

QeRL's scripts train the two RMSNorms of each layer besides LoRA (PEFT's `modules_to_save`), without a word in the paper
(arXiv 2510.11696). Here the weight is

    w = base + shift,    base as in model.path, shift in float32, zero at first

since FSDP2 rounds what computes to bf16: 8 bits of a shift of 1e-4 are left, but of a weight near 1 no such change is.
Weight decay pulls the shift to 0, as it does an adapter.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

NORMS = ("input_layernorm", "post_attention_layernorm")
# verl keeps what has `.adapter_` in its name in a LoRA-only checkpoint.
SHIFT = "adapter_shift"
_NAME = re.compile(rf"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save\.default)?\.{SHIFT}")

Value = TypeVar("Value")


def shifted_norm(name: str) -> str | None:
    """The norm that a tensor shifts, by its module's name in the base model; None for another tensor.

    Args:
        name: The name that PEFT saves, or that of the model's state.
    """
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def split_norms(tensors: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """(what belongs to an adapter by name, shifts by norm)."""
    adapter = {name: value for name, value in tensors.items() if shifted_norm(name) is None}
    norms = {norm: value for name, value in tensors.items() if (norm := shifted_norm(name)) is not None}
    return adapter, norms
