"""Frozen linears of one input with their LoRA adapters, as one autograd function.

    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T

x and x A^T lie beside each other as one input, W and B as one weight: both terms and the bias are summed before the
output is rounded, as in the rollout. After the first updates the adapter's term is far below a rounding step. PEFT
rounds both and loses it. So does a product that adds to the term in place (`addmm_`): cuBLAS rounds the product first,
on an H200 for all but a few shapes, with and without torch's allow_bf16_reduced_precision_reduction
(tests/bench/bench_adapter_sums.py).

Linears of one input (q, k, v; gate, up) share that input. The gradient of x is summed in place: there a young
adapter's part, as small beside the rest as its term is beside the output, is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

ReadWeights = Callable[[torch.dtype], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class FrozenWeights:
    """How frozen W_i [N_i, K] are read; both give dense tensors of the dtype they are called with.

    Attributes:
        forward: For the products with x.
        backward: For the gradient of x, once per forward.
    """

    forward: ReadWeights
    backward: ReadWeights


def _products(
    x: torch.Tensor, weights: FrozenWeights, scalings: Sequence[float], As: Any, Bs: Any, biases: Any
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(all y_i, x as [M, K], its scaled product with the stacked A, that A)."""
    flat = x.reshape(-1, x.shape[-1])
    A = As[0] if len(As) == 1 else torch.cat(As)
    low = flat.new_empty(flat.shape[0], A.shape[0])
    # Scaled before it is rounded, where one factor is that of all.
    same = scalings.count(scalings[0]) == len(scalings)
    low.addmm_(flat, A.t(), beta=0, alpha=scalings[0] if same else 1)
    parts = _split(low, Bs)
    if not same:
        for part, scaling in zip(parts, scalings, strict=True):
            part.mul_(scaling)
    padding = -low.shape[1] % 8  # rows from multiples of 16 bytes on, for cuBLAS's faster kernels
    wide, wide_Bs = torch.cat([flat, low, low.new_zeros(len(low), padding)], 1), torch.block_diag(*Bs)
    wide_Bs = torch.cat([wide_Bs, wide_Bs.new_zeros(len(wide_Bs), padding)], 1).split([len(B) for B in Bs])
    Ws = weights.forward(x.dtype)
    ys = [F.linear(wide, torch.cat([W, B], 1), bias) for W, B, bias in zip(Ws, wide_Bs, biases, strict=True)]
    ys = [y.view(*x.shape[:-1], y.shape[1]) for y in ys]  # no -1: x may have no rows
    return tuple(ys), flat, low, A


def _split(low: torch.Tensor, Bs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The columns of each adapter."""
    return low.split_with_sizes([B.shape[1] for B in Bs], 1)


class _AdaptedLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: FrozenWeights, scalings: Sequence[float], *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        count = len(scalings)
        Bs: Any = tensors[count : 2 * count]
        ys, flat, low, A = _products(x, weights, scalings, tensors[:count], Bs, tensors[2 * count :])
        ctx.save_for_backward(flat, low, A, *Bs)
        ctx.weights, ctx.scalings, ctx.shape = weights, scalings, x.shape
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        flat, low, A, *Bs = ctx.saved_tensors
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        low_grads = torch.empty_like(low)  # of x A^T
        for grad, B, scaling, part in zip(grads, Bs, ctx.scalings, _split(low_grads, Bs), strict=True):
            part.addmm_(grad, B, beta=0, alpha=scaling)
        grad_x = low_grads @ A if ctx.needs_input_grad[0] else None
        Ws = ctx.weights.backward(low.dtype)  # also where x needs no gradient: what is kept for it is released
        if grad_x is not None:
            for grad, W in zip(grads, Ws, strict=True):
                grad_x.addmm_(grad, W)
            grad_x = grad_x.view(ctx.shape)
        grad_As = (low_grads.t() @ flat).split_with_sizes([B.shape[1] for B in Bs])
        grad_Bs = [grad.t() @ part for grad, part in zip(grads, _split(low, Bs), strict=True)]
        return grad_x, None, None, *grad_As, *grad_Bs, *[None] * len(Bs)


def adapted_linears(
    x: torch.Tensor,
    weights: FrozenWeights,
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The products of one x with several frozen weights and their adapters, differentiable in x, As and Bs.

    Args:
        x: [..., K] floating point.
        weights: Readers of n W_i, [N_i, K] each.
        As: n of [R_i, K], of x's dtype.
        Bs: n of [N_i, R_i], of x's dtype.
        scalings: n factors s_i.
        biases: n of [N_i], of x's dtype and frozen, or None.

    Returns:
        n of [..., N_i], of x's dtype.
    """
    if not torch.is_grad_enabled():
        return _products(x, weights, scalings, As, Bs, biases)[0]
    return _AdaptedLinears.apply(x, weights, scalings, *As, *Bs, *biases)  # type: ignore[return-value]
