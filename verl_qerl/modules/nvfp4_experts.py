"""The experts of a mixture-of-experts layer, packed and frozen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.nvfp4 import BLOCK_SIZE, nvfp4_weight
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4
from verl_qerl.kernels.actor.linear import experts_linear


class PackedStack(nn.Module):
    """Weights of one shape, [G, N, K], each packed with a global scale of its own.

    The tensors are uint8 buffers, as in NVFP4Linear: every rank holds them, and no checkpoint does.

    Attributes:
        codes: [G, N, K / 2] uint8.
        scale: [G, N, K / 16] uint8, the bytes of float8_e4m3fn.
        decode_scale: [G * 4] uint8, the bytes of G float32.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    decode_scale: torch.Tensor

    def __init__(self, G: int, N: int, K: int, device: torch.device | str) -> None:
        super().__init__()
        if K % BLOCK_SIZE:
            raise ValueError(
                f"in_features={K} of experts is not a multiple of {BLOCK_SIZE}. NVFP4 cannot hold these weights."
                " Use a model of other sizes."
            )
        self.shape = (G, N, K)
        for name, shape in (("codes", (G, N, K // 2)), ("scale", (G, N, K // BLOCK_SIZE)), ("decode_scale", (G * 4,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=device), persistent=False)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """All weights, one below the other: [G * N, K] of `dtype`."""
        codes, scale = self.codes.flatten(0, 1), self.scale.flatten(0, 1)
        return dequantize_nvfp4(codes, scale, self.decode_scale.view(torch.float32), dtype)

    def extra_repr(self) -> str:
        """Number and shape of the weights."""
        return "{} x {} x {}, nvfp4".format(*self.shape)


@dataclass(frozen=True)
class ExpertLinear:
    """One linear of one expert: a place in a stack that a packed weight is read into."""

    stack: PackedStack
    index: int

    @property
    def out_features(self) -> int:
        """N."""
        return self.stack.shape[1]

    @property
    def in_features(self) -> int:
        """K."""
        return self.stack.shape[2]

    def fill(self, packed: PackedWeight) -> None:
        """Copy a packed weight into the stack; the first one decides the device of all."""
        stack = self.stack
        if stack.codes.is_meta:
            stack.to_empty(device=packed.codes.device)
        stack.codes[self.index] = packed.codes
        stack.scale[self.index] = packed.block_scale.view(torch.uint8)
        stack.decode_scale.view(torch.float32)[self.index] = packed.global_decode_scale

    def packed(self) -> PackedWeight:
        """The weight over the stack's own storage."""
        stack, g = self.stack, self.index
        decode_scale = stack.decode_scale.view(torch.float32)[g]
        return nvfp4_weight(stack.codes[g], stack.scale[g].view(torch.float8_e4m3fn), decode_scale)


class NVFP4Experts(nn.Module):
    """Qwen3MoeExperts of transformers with packed weights, gradients for the inputs.

    The steps and their order are those of its implementation `grouped_mm`, whichever one the model asks for.
    """

    def __init__(
        self, num_experts: int, hidden_dim: int, intermediate_dim: int, act_fn: nn.Module, device: torch.device | str
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = PackedStack(2 * num_experts, intermediate_dim, hidden_dim, device)
        self.down = PackedStack(num_experts, hidden_dim, intermediate_dim, device)
        self.act_fn = act_fn

    @classmethod
    def from_experts(cls, experts: Qwen3MoeExperts) -> "NVFP4Experts":
        """An unfilled module of the same sizes, on the device of `experts`; a ValueError unless 16 divides them."""
        found: Any = experts
        sizes = found.num_experts, found.hidden_dim, found.intermediate_dim
        return cls(*sizes, found.act_fn, found.down_proj.device)

    def linears(self) -> Iterator[tuple[str, ExpertLinear]]:
        """(name as in a checkpoint, e.g. `5.up_proj`; its place) of every linear of every expert."""
        for e in range(self.num_experts):
            yield f"{e}.gate_proj", ExpertLinear(self.gate_up, 2 * e)
            yield f"{e}.up_proj", ExpertLinear(self.gate_up, 2 * e + 1)
            yield f"{e}.down_proj", ExpertLinear(self.down, e)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Each token's weighted sum over its experts, in the dtype of the input or of an active autocast.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, top_k], which experts.
            top_k_weights: [T, top_k].

        Returns:
            [T, H].
        """
        device = hidden_states.device.type
        if torch.is_autocast_enabled(device):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device))
        top_k = top_k_index.shape[-1]
        experts, order = top_k_index.flatten().sort()
        every = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        gate, up = self._product(hidden_states[order // top_k], ends, self.gate_up).chunk(2, dim=-1)
        outputs = self._product(self.act_fn(gate) * up, ends, self.down)
        weighted = outputs * top_k_weights.flatten()[order, None]
        in_place = torch.empty_like(order)
        in_place[order] = torch.arange(len(order), device=order.device)
        summed = weighted[in_place].view(*top_k_index.shape, outputs.shape[1]).sum(dim=1)
        return summed.to(hidden_states.dtype)

    def _product(self, x: torch.Tensor, ends: torch.Tensor, stack: PackedStack) -> torch.Tensor:
        # Of an expert: gate above up, as a chunk of the output expects them.
        return experts_linear(x, ends, lambda dtype: stack.decode(dtype).view(self.num_experts, -1, x.shape[1]))
