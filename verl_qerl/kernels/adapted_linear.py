"""Frozen linears of one input with their LoRA adapters, as one autograd function.

    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T

PEFT writes each term and each sum to memory. Here the adapter's term is written first, in place of an empty result, and
the base product adds to it within its own pass: no output is read or written for the adapter alone. Linears of one
input (q, k, v; gate, up) share the products with their stacked A, and the gradient of x is summed in one tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

ReadWeight = Callable[[torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class FrozenWeight:
    """How one frozen W [N, K] is read; both give a dense tensor of the dtype they are called with.

    Attributes:
        forward: For the product with x.
        backward: For the gradient of x, once per forward.
    """

    forward: ReadWeight
    backward: ReadWeight


class _AdaptedLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: Sequence[FrozenWeight],
        scalings: Sequence[float],
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        count = len(weights)
        As: Any = tensors[:count]
        Bs: Any = tensors[count : 2 * count]
        biases = tensors[2 * count :]
        flat = x.reshape(-1, x.shape[-1])
        ranks = [A.shape[0] for A in As]
        scaled = [A if scaling == 1 else A * scaling for A, scaling in zip(As, scalings, strict=True)]
        shrunk = flat @ _stack(scaled).t()
        results = []
        for weight, B, bias, part in zip(weights, Bs, biases, shrunk.split(ranks, 1), strict=True):
            y = part @ B.t() if bias is None else torch.addmm(bias, part, B.t())
            results.append(y.addmm_(flat, weight.forward(x.dtype).t()).view(*x.shape[:-1], -1))
        ctx.save_for_backward(flat, shrunk, *As, *Bs)
        ctx.weights, ctx.scalings, ctx.ranks, ctx.shape = weights, scalings, ranks, x.shape
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        count = len(ctx.weights)
        flat, shrunk, *adapters = ctx.saved_tensors
        As, Bs = adapters[:count], adapters[count:]
        needs = ctx.needs_input_grad
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        shrunk_grads = torch.empty_like(shrunk)  # of x A^T
        for grad, B, scaling, part in zip(grads, Bs, ctx.scalings, shrunk_grads.split(ctx.ranks, 1), strict=True):
            torch.mm(grad, B, out=part)
            if scaling != 1:
                part.mul_(scaling)
        grad_x = shrunk_grads @ _stack(As) if needs[0] else None
        for grad, weight in zip(grads, ctx.weights, strict=True):
            dense = weight.backward(grad.dtype)  # also where x needs no gradient: what is kept for it is released
            if grad_x is not None:
                grad_x.addmm_(grad, dense)
        grad_As = (shrunk_grads.t() @ flat).split(ctx.ranks)
        grad_Bs = [grad.t() @ part for grad, part in zip(grads, shrunk.split(ctx.ranks, 1), strict=True)]
        grad_x = None if grad_x is None else grad_x.view(ctx.shape)
        return grad_x, None, None, *grad_As, *grad_Bs, *[None] * count


def _stack(As: Sequence[torch.Tensor]) -> torch.Tensor:
    return As[0] if len(As) == 1 else torch.cat(As)  # type: ignore[arg-type]


def adapted_linears(
    x: torch.Tensor,
    weights: Sequence[FrozenWeight],
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The products of one x with several frozen weights and their adapters, differentiable in x, As and Bs.

    Args:
        x: [..., K] floating point.
        weights: n readers, W_i of [N_i, K].
        As: n of [R_i, K], of x's dtype.
        Bs: n of [N_i, R_i], of x's dtype.
        scalings: n factors s_i.
        biases: n of [N_i], of x's dtype and frozen, or None.

    Returns:
        n of [..., N_i], of x's dtype.
    """
    return _AdaptedLinears.apply(x, weights, scalings, *As, *Bs, *biases)  # type: ignore[return-value]
