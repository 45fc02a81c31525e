"""Norms trained beside an adapter, as PEFT's modules_to_save: on and off with it, and the base's where it is off."""

import re
from typing import Any

import torch
import torch.nn as nn
from peft.utils import ModulesToSaveWrapper

from verl_qerl.algos.trained_norms import NORMS, SHIFT

_ADAPTER = "default"
_LAYER = re.compile(r".*\blayers\.\d+")


class TrainedNorm(ModulesToSaveWrapper):
    """A norm whose weight is its frozen one plus a trained shift, computed in float32 and rounded once at its end.

    PEFT would train a copy of the weight. FSDP2 rounds parameters to bf16 where they compute, which of the shift leaves
    8 bits and of a weight near 1 nothing of a change below 2e-3. The rollout adds the same rounded shift to the same
    weight. Transformers' norms round before they multiply by the weight too, which takes such a change back where the
    frozen weight is 1; vLLM's with float32 weights do not. The norm of the base is computed the same way, so that actor
    and reference policy are one function before training.
    """

    def __init__(self, norm: Any) -> None:  # a module with a weight
        super().__init__(norm, _ADAPTER)
        shift = torch.zeros_like(norm.weight, dtype=torch.float32)  # [K], what the norm has learned
        self.modules_to_save[_ADAPTER] = nn.ParameterDict({SHIFT: shift})

    def _forward_wrapped(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., K] -> [..., K] of the dtype of x."""
        norm = self.original_module
        weight = norm.weight.float() + getattr(self.modules_to_save[_ADAPTER], SHIFT).float()
        return torch.func.functional_call(norm, {"weight": weight}, (x.float(), *args), kwargs).to(x.dtype)

    def _forward_wrapped_passthrough(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.original_module(x.float(), *args, **kwargs).to(x.dtype)


def train_norms(model: nn.Module) -> int:
    """Make the two norms of every decoder layer trainable, in place, and return their number.

    Args:
        model: With an adapter of PEFT or about to get one; weights may be on the meta device.

    Raises:
        ValueError: The model has no layers, or one without both norms, or a norm that has more than a weight.
    """
    layers = [name for name, _ in model.named_modules() if _LAYER.fullmatch(name)]
    if not layers:
        raise _unknown("the model has no decoder layers")
    found: dict[str, nn.Module] = {}
    for layer in layers:
        norms = dict(model.get_submodule(layer).named_children())
        for name in NORMS:
            if name not in norms:
                raise _unknown(f"{layer} has no {name}")
            shapes = {key: tuple(parameter.shape) for key, parameter in norms[name].named_parameters()}
            if len(shapes.get("weight", ())) != 1 or len(shapes) != 1:
                raise _unknown(f"{layer}.{name} has the parameters {shapes}")
            found[f"{layer}.{name}"] = norms[name]
    for name, norm in found.items():
        model.set_submodule(name, TrainedNorm(norm))
    return len(found)


def _unknown(what: str) -> ValueError:
    return ValueError(
        f"the norms of this model cannot be trained: {what}. Accepted are layers with {' and '.join(NORMS)}, each a"
        " vector `weight` alone. Leave out +qerl.base.train_norms."
    )
