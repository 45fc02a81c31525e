"""PEFT's LoRA layer with its forward pass as one function; parameters, names and everything else are PEFT's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from peft.tuners.lora import Linear as LoraLinear

from verl_qerl import upstream
from verl_qerl.formats.nvfp4_layout import FUSED_GROUPS
from verl_qerl.kernels.actor.adapted_linear import FrozenWeights, adapted_linears
from verl_qerl.modules import hosts
from verl_qerl.modules.packed_linear import PackedLinear


class AdaptedLinear(LoraLinear):
    """peft.tuners.lora.Linear over a frozen PackedLinear or nn.Linear; made from one by `fuse_adapters`.

    One active, plain adapter in the dtype of the products is computed by `kernels.actor.adapted_linear`. For everything
    else (no or several adapters, dropout, variants of LoRA, another dtype) this is PEFT's own forward pass.
    """

    _siblings: "Siblings | None" = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., K] -> [..., N]; arguments as PEFT's."""
        siblings = self._siblings
        if siblings is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        output = siblings.output(self, x)
        return super().forward(x) if output is None else output

    def parts(self, dtype: torch.dtype, cast: bool) -> tuple[Any, ...] | None:
        """(A, B, scaling, bias) of what the fused function takes, or None where it does not compute what PEFT would.

        Args:
            dtype: The dtype of the products.
            cast: Whether A and B are cast to it, as under autocast; else they must have that dtype.
        """
        active = self.active_adapters
        if self.disable_adapters or self.merged or len(active) != 1 or active[0] in self.lora_variant:
            return None
        (name,) = active
        # Each is asked for once: a module's attribute takes its time.
        As: Any = self.lora_A
        Bs: Any = self.lora_B
        base: Any = self.base_layer
        if name not in As or self.lora_bias.get(name):
            return None
        if self.training and not isinstance(self.lora_dropout[name], nn.Identity):
            return None
        if not isinstance(base, PackedLinear) and base.weight.requires_grad:
            return None
        A, B, bias = As[name].weight, Bs[name].weight, base.bias
        if not (cast or A.dtype == B.dtype == dtype):
            return None
        return A.to(dtype), B.to(dtype), self.scaling[name], None if bias is None else bias.to(dtype)


class Siblings:
    """Linears that the model calls one after the other with the same input; the first call computes all.

    The outputs of the others wait until they are asked for with that very tensor; another input drops them.
    """

    def __init__(self, members: list[AdaptedLinear]) -> None:
        self.members = members
        self._input: torch.Tensor | None = None
        self._waiting: dict[AdaptedLinear, torch.Tensor] = {}
        self._recomputed: Sequence[torch.Tensor] = ()  # dense weights
        self._weights = FrozenWeights(self._read_forward, self._read_backward)

    def output(self, member: AdaptedLinear, x: torch.Tensor) -> torch.Tensor | None:
        """What `member` gives for x; None where PEFT has to compute it."""
        if self._input is not x or member not in self._waiting:
            outputs = self._outputs(x)
            if outputs is None:
                return None
            self._waiting = dict(zip(self.members, outputs, strict=True))
            self._input = x
        output = self._waiting.pop(member)
        if not self._waiting:
            self._input = None
        return output

    def _outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        device, dtype = x.device.type, x.dtype
        if cast := torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        parts: Any = [member.parts(dtype, cast) for member in self.members]
        if None in parts:
            return None
        return adapted_linears(x.to(dtype), self._weights, *zip(*parts, strict=True))

    def _read_forward(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The weights; within a checkpoint's recomputation, kept for the backward pass that follows at once."""
        weights = self._read(dtype)
        if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint finds out: a backward pass is running
            self._recomputed = weights
        return weights

    def _read_backward(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The weights, or what the recomputation kept, which is then released."""
        weights, self._recomputed = self._recomputed, ()
        return weights if weights and weights[0].dtype == dtype else self._read(dtype)

    def _read(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        bases: list[Any] = [member.base_layer for member in self.members]
        kind = type(bases[0])
        if issubclass(kind, PackedLinear) and all(type(base) is kind for base in bases):
            return kind.decode_siblings(bases, dtype)
        return [base.decode(dtype) if isinstance(base, PackedLinear) else base.weight.to(dtype) for base in bases]


def fuse_adapters(model: nn.Module) -> int:
    """Turn the LoRA linears of a PEFT model, on PackedLinear and frozen nn.Linear, into AdaptedLinear, in place.

    Siblings are q, k, v and gate, up of one parent where the model has them so; the rest stand alone.

    Returns:
        How many linears were turned; none is no error, a model may have no adapters.
    """
    count = 0
    for parent in model.modules():
        found = {name: child for name, child in parent.named_children() if _can_be_fused(child)}
        for child in found.values():
            upstream.swap_class(hosts.LORA_LINEAR, child, AdaptedLinear)
        groups = [group for group in FUSED_GROUPS if all(name in found for name in group)]
        grouped = {name for group in groups for name in group}
        for names in [*groups, *([name] for name in found if name not in grouped)]:
            siblings = Siblings([found[name] for name in names])  # type: ignore[misc]
            member: AdaptedLinear
            for member in siblings.members:
                member._siblings = siblings
        count += len(found)
    return count


def _can_be_fused(module: nn.Module) -> bool:
    return type(module) is LoraLinear and (
        type(module.base_layer) is nn.Linear or isinstance(module.base_layer, PackedLinear)
    )
