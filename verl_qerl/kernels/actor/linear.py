"""y = x W^T with a packed, frozen W: dequantize one layer, then the dense product of the library.

At training sizes a fused product cannot win (the dequantization costs about 209 / tokens of the product, 2.5 % at 8k),
so there is none. Neither pass keeps the dense weight: backward decodes it again. Nor is the packed one saved for
backward: verl's activation offload would move it to the host and back.
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
