"""The linears of all experts of a layer as one autograd function: y = x W_e^T for the tokens of each expert e.

All experts are decoded at once: with thousands of tokens every one of them is used, and two launches decode a layer.
Neither pass keeps the dense weights: backward decodes them again. Nor are the packed ones saved for backward: verl's
activation offload would move them to the host and back.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


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
