"""The linears of all experts of a layer as one autograd function: y = x W_e^T for the tokens of each expert e.

All experts are decoded at once: with thousands of tokens every one of them is used, and two launches decode a layer.
Neither pass keeps the dense weights: backward decodes them again.
"""

from typing import Any

import torch
import torch.nn.functional as F

from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4


class _ExpertsLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor,
        codes: torch.Tensor,
        block_scale: torch.Tensor,
        global_decode_scale: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(ends)
        ctx.packed = codes, block_scale, global_decode_scale  # what is saved, verl's activation offload would move
        weights = _decode(*ctx.packed, x.dtype)
        return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = grad_outputs
        (ends,) = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            # A sum over tokens hands on a gradient without strides, which the product does not take.
            codes, block_scale, global_decode_scale = ctx.packed
            weights = _decode(codes, block_scale, global_decode_scale, grad_y.dtype)
            grad_x = F.grouped_mm(grad_y.contiguous(), weights, offs=ends)
        return grad_x, None, None, None, None


def experts_linear(
    x: torch.Tensor,
    ends: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
) -> torch.Tensor:
    """Multiply each expert's tokens by its weight; differentiable in x alone.

    Args:
        x: [S, K] bfloat16, float16 or float32, sorted by expert; K and N are multiples of 16.
        ends: [E] int32: the tokens of expert e are x[ends[e - 1] : ends[e]].
        codes: [E, N, K / 2] uint8.
        block_scale: [E, N, K / 16] uint8, the bytes of float8_e4m3fn.
        global_decode_scale: [G] float32, G a multiple of E: of N * E / G rows each.

    Returns:
        [S, N] of x's dtype.
    """
    return _ExpertsLinearFunction.apply(x, ends, codes, block_scale, global_decode_scale)


def _decode(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[E, N, K] of `dtype`."""
    dense = dequantize_nvfp4(codes.flatten(0, 1), block_scale.flatten(0, 1), global_decode_scale, dtype)
    return dense.view(*codes.shape[:2], -1)
