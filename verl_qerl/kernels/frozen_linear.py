"""y = x W^T + bias with a frozen W that is decoded for each pass and kept for none."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from verl_qerl.kernels.adapted_linear import FrozenWeight


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return F.linear(x, weight.forward(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = grad_outputs
        grad_x = grad_y @ ctx.weight.backward(grad_y.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, None


def frozen_linear(x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product x W^T + bias, differentiable in x alone.

    Args:
        x: [..., K] floating point.
        weight: Reader of W [N, K].
        bias: [N] of x's dtype, frozen, or None.

    Returns:
        [..., N] of x's dtype.
    """
    return _FrozenLinear.apply(x, weight, bias)  # type: ignore[return-value]
