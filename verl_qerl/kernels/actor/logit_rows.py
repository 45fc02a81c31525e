"""Log-probs and entropies of rows of logits, and their gradient, each in one pass over the logits.

Torch makes a float32 copy and some ten passes over it. Verl's and Liger's kernels with this purpose compute the product
with the head too, or the gradient before its factors are known. Here a program reads a row once, block by block, and
keeps the largest value so far, m, with the sums of e^(x - m) and of e^(x - m) (x - m), rescaled where m grows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096  # columns that a program holds at a time
Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def score_rows(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: bool, fused: bool = False
) -> Scored:
    """From softmax(logits / temperature): log-probs of labels, logarithms of the sums, and entropies.

    Args:
        logits: [R, V] floating point, finite; rows of stride 1.
        labels: [R] int64, each in [0, V).
        temperature: Above zero.
        entropy: Whether entropies are wanted; else they are zero.
        fused: By the Triton kernel on a GPU; else by torch.

    Returns:
        Three of [R] float32.
    """
    return (launch if fused and logits.is_cuda else _score_in_torch)(logits, labels, temperature, entropy)


def gradient_of_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    scored: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor | None],
    fused: bool = False,
) -> torch.Tensor:
    """The gradient of what `score_rows` gives.

        d log p_y / d logit_v = ([v = y] - p_v) / temperature
        d H / d logit_v = - p_v (log p_v + H) / temperature

    Args:
        logits: [R, V], may be overwritten.
        scored: Logarithms of the sums, and entropies, which are read where they have a gradient.
        grads: Gradients of the log-probs and of the entropies, [R] float32 each; None: no gradient of these.

    Returns:
        [R, V] of logits' dtype, computed in float32 and rounded once.
    """
    compute = launch_gradient if fused and logits.is_cuda else _gradient_in_torch
    return compute(logits, labels, temperature, scored, grads)


def _score_in_torch(logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: bool) -> Scored:
    logits = logits.float() / temperature
    log_sums = logits.logsumexp(dim=-1)
    log_probs = logits.gather(-1, labels[:, None])[:, 0] - log_sums
    if not entropy:
        return log_probs, log_sums, torch.zeros_like(log_sums)
    log_p = logits.sub_(log_sums[:, None])
    return log_probs, log_sums, -log_p.exp().mul_(log_p).sum(dim=-1)


def _gradient_in_torch(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, scored: Any, grads: Any
) -> torch.Tensor:
    (log_sums, entropies), (grad, grad_entropy) = scored, grads
    log_p = (logits.float() / temperature).sub_(log_sums[:, None])
    factor = -grad[:, None]
    if grad_entropy is not None:
        factor = factor - grad_entropy[:, None] * (log_p + entropies[:, None])
    dense = log_p.exp_().mul_(factor)
    dense.scatter_add_(1, labels[:, None], grad[:, None])
    return dense.div_(temperature).to(logits.dtype)


def launch(logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: bool) -> Scored:
    """Run the Triton kernel; as `score_rows`."""
    rows, vocabulary = logits.shape
    log_probs, log_sums = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropies = torch.zeros_like(log_sums)
    shape: Any = {"ENTROPY": entropy, "BLOCK": BLOCK, "num_warps": 8}
    source = (logits, labels.contiguous(), 1 / temperature, vocabulary, logits.stride(0))
    if rows:
        _score_kernel[(rows,)](*source, log_probs, log_sums, entropies, **shape)
    return log_probs, log_sums, entropies


def launch_gradient(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, scored: Any, grads: Any
) -> torch.Tensor:
    """Run the Triton kernel, in place; as `gradient_of_rows`."""
    (log_sums, entropies), (grad, grad_entropy) = scored, grads
    rows, vocabulary = logits.shape
    shape: Any = {"ENTROPY": grad_entropy is not None, "BLOCK": BLOCK, "num_warps": 8}
    of_entropy = log_sums if grad_entropy is None else grad_entropy.contiguous()  # not read where there is none
    source = (logits, labels.contiguous(), 1 / temperature, vocabulary, logits.stride(0))
    if rows:
        grid = (rows, triton.cdiv(vocabulary, BLOCK))
        _gradient_kernel[grid](*source, log_sums, entropies, grad.contiguous(), of_entropy, **shape)
    return logits


@triton.jit
def _score_kernel(
    logits_ptr,
    label_ptr,
    inverse,
    vocabulary,
    stride,
    log_prob_ptr,
    log_sum_ptr,
    entropy_ptr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    largest, mass, moment = -1e30, 0.0, 0.0
    for first in range(0, vocabulary, BLOCK):
        n = first + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + n, mask=n < vocabulary, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(largest, tl.max(values, 0))
        moved = largest - higher
        scale = tl.exp(moved)
        values -= higher
        weights = tl.exp(values)
        if ENTROPY:
            # No logit has no weight, and -inf times that is no number.
            moment = (moment + moved * mass) * scale + tl.sum(tl.where(weights == 0, 0.0, weights * values), 0)
        mass = mass * scale + tl.sum(weights, 0)
        largest = higher
    chosen = tl.load(row_ptr + tl.load(label_ptr + row)).to(tl.float32) * inverse
    log_mass = tl.log(mass)
    tl.store(log_prob_ptr + row, chosen - largest - log_mass)
    tl.store(log_sum_ptr + row, largest + log_mass)
    if ENTROPY:
        tl.store(entropy_ptr + row, log_mass - moment / mass)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    label_ptr,
    inverse,
    vocabulary,
    stride,
    log_sum_ptr,
    entropy_ptr,
    grad_ptr,
    grad_entropy_ptr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row.to(tl.int64) * stride + n
    log_p = tl.load(at, mask=n < vocabulary, other=0).to(tl.float32) * inverse - tl.load(log_sum_ptr + row)
    grad = tl.load(grad_ptr + row)
    factor = -grad
    if ENTROPY:
        factor = factor - tl.load(grad_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    dense = tl.exp(log_p) * factor + tl.where(n == tl.load(label_ptr + row), grad, 0.0)
    tl.store(at, (dense * inverse).to(logits_ptr.dtype.element_ty), mask=n < vocabulary)
