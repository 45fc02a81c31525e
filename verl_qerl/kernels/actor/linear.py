"""y = x W^T with a packed, frozen W: dequantize one layer, then the dense product of the library.

At training sizes a fused product cannot win (the dequantization costs about 209 / tokens of the product, 2.5 % at 8k),
so there is none. Neither pass keeps the dense weight: backward decodes it again. Nor is the packed one saved for
backward: verl's activation offload would move it to the host and back. All experts of a layer are decoded at once: with
thousands of tokens every one of them is used, and two launches decode a layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


class _FrozenLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, decode: Callable[[torch.dtype], torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.decode = decode
        return F.linear(x, decode(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = grad_outputs
        return grad_y @ ctx.decode(grad_y.dtype) if ctx.needs_input_grad[0] else None, None, None


def frozen_linear(
    x: torch.Tensor, decode: Callable[[torch.dtype], torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product x W^T + bias with a W that lies in any layout, differentiable in x alone.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        decode: Gives W [N, K] in the dtype that it is called with; called once a pass.
        bias: [N] of x's dtype, frozen, or None.

    Returns:
        [..., N] of x's dtype.
    """
    return _FrozenLinearFunction.apply(x, decode, bias)  # type: ignore[return-value]


class _ExpertsLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, decode: Callable[[torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(ends)
        ctx.decode = decode
        return F.grouped_mm(x, decode(x.dtype).transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = grad_outputs
        (ends,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None
        # A sum over tokens hands on a gradient without strides, which the product does not take.
        return F.grouped_mm(grad_y.contiguous(), ctx.decode(grad_y.dtype), offs=ends), None, None


def experts_linear(x: torch.Tensor, ends: torch.Tensor, decode: Callable[[torch.dtype], torch.Tensor]) -> torch.Tensor:
    """Multiply each expert's tokens by its weight; differentiable in x alone.

    Args:
        x: [S, K] bfloat16, float16 or float32, sorted by expert; K and N are multiples of 16.
        ends: [E] int32: the tokens of expert e are x[ends[e - 1] : ends[e]].
        decode: Gives all weights, [E, N, K] in the dtype that it is called with; called once a pass.

    Returns:
        [S, N] of x's dtype.
    """
    return _ExpertsLinearFunction.apply(x, ends, decode)
