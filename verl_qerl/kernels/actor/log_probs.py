"""Log-probabilities of given tokens in float32 and bounded memory: from logits, or from hidden states and the head.

Without flash-attn verl takes them from logits token by token: some kernels each, and the time of a small model goes
into launching them. Under autocast a GPU takes them in float32 all the same. A CPU does not: near -4 a bf16
log-probability has steps of 2**-6, as large as the differences that policy ratios are made of.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verl_qerl.kernels.actor.logit_rows import gradient_of_rows, score_rows

# Tokens whose logits exist at a time: 0.3 GB in bf16 for a vocabulary of 152k, 0.6 GB in float32.
_CHUNK_TOKENS = 1024


def _chunks(tokens: int) -> Iterator[slice]:
    # One chunk of no tokens, since results are put together from chunks.
    return (slice(at, at + _CHUNK_TOKENS) for at in range(0, tokens or 1, _CHUNK_TOKENS))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks = _chunks(len(labels))
        scored = [score_rows(logits[part], labels[part], temperature=1.0, entropy=False) for part in chunks]
        log_probs, log_sums, _ = (torch.cat(parts) for parts in zip(*scored, strict=True))
        ctx.save_for_backward(logits, labels, log_sums)
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, log_sums = ctx.saved_tensors
        (grad,) = grad_outputs
        out = torch.empty_like(logits)
        for part in _chunks(len(labels)):
            scored = (log_sums[part], log_sums[part])
            out[part] = gradient_of_rows(logits[part], labels[part], 1.0, scored, (grad[part], None))
        return out, None


def log_probs_of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log softmax(logits)[labels], differentiable in the logits.

    Args:
        logits: [..., V] floating point.
        labels: [...] int64, each in [0, V).

    Returns:
        [...] float32. Kept for backward: the logits themselves and one float32 a token.
    """
    vocabulary = logits.shape[-1]
    flat: torch.Tensor = _LogProbs.apply(logits.reshape(-1, vocabulary), labels.reshape(-1))  # type: ignore[assignment]
    return flat.view(labels.shape)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        entropy: bool,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, log_sums, entropies = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(3))
        for part in _chunks(len(labels)):
            scored = score_rows(_logits(hidden[part], weight), labels[part], temperature, entropy, fused)
            log_probs[part], log_sums[part], entropies[part] = scored
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropies)
        ctx.temperature, ctx.entropy, ctx.fused = temperature, entropy, fused
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_sums, entropies = ctx.saved_tensors
        grad, grad_entropy = grad_outputs
        out = torch.empty_like(hidden)
        for part in _chunks(len(labels)):
            grads = (grad[part], grad_entropy[part] if ctx.entropy else None)
            scored = (log_sums[part], entropies[part])
            logits = _logits(hidden[part], weight)
            dense = gradient_of_rows(logits, labels[part], ctx.temperature, scored, grads, ctx.fused)
            torch.mm(dense, weight, out=out[part])
        return out, None, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden @ weight.t()


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log softmax(hidden weight^T / temperature)[labels] and the entropies, without the logits ever being whole.

    A chunk of logits exists at a time, and again in backward: the product with `weight` is computed twice.

    Args:
        hidden: [..., D] floating point.
        weight: [V, D] of hidden's dtype, frozen.
        labels: [...] int64, each in [0, V).
        temperature: Above zero.
        entropy: Whether the second result is wanted; else it is zero.
        fused: By the Triton kernels of `logit_rows` on a GPU; else by torch.

    Returns:
        Two of [...] float32, differentiable in `hidden` alone.

    Raises:
        ValueError: `weight` is trained.
    """
    if weight.requires_grad:
        raise ValueError(
            "the output head has a gradient. Accepted is a frozen one. Set"
            " actor_rollout_ref.model.use_fused_kernels=False to train it."
        )
    flat = hidden.reshape(-1, hidden.shape[-1])
    found: Any = _LinearLogProbs.apply(flat, weight, labels.reshape(-1), temperature, entropy, fused)
    return found[0].view(labels.shape), found[1].view(labels.shape)
