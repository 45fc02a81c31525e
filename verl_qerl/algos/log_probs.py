"""Log-probabilities of given tokens from half-precision logits or hidden states, in float32 and in bounded memory.

Without flash-attn verl takes them token by token: some kernels each, and the time of a small model goes into launching
them. Under autocast a GPU takes them in float32 all the same. A CPU does not: near -4 a bf16 log-probability has steps
of 2**-6, as large as the differences that policy ratios are made of.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Tokens whose float32 logits exist at a time: 0.6 GB for a vocabulary of 152k.
_CHUNK_TOKENS = 1024


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks = zip(logits.split(_CHUNK_TOKENS), labels.split(_CHUNK_TOKENS), strict=True)
        log_sums = torch.cat([part.float().logsumexp(dim=-1) for part in logits.split(_CHUNK_TOKENS)])
        chosen = torch.cat([part.gather(-1, label[:, None])[:, 0].float() for part, label in chunks])
        ctx.save_for_backward(logits, labels, log_sums)
        return chosen - log_sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, log_sums = ctx.saved_tensors
        (grad,) = grad_outputs
        out = torch.empty_like(logits)
        for at in range(0, len(labels), _CHUNK_TOKENS):
            part = slice(at, at + _CHUNK_TOKENS)
            # d log p_y / d logit_v = [v = y] - p_v
            dense = (logits[part].float() - log_sums[part, None]).exp_().mul_(-grad[part, None])
            dense.scatter_add_(1, labels[part, None], grad[part, None].float())
            out[part] = dense.to(out.dtype)
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
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, log_sums, entropies = (hidden.new_zeros(len(labels), dtype=torch.float32) for _ in range(3))
        for part in _chunks(len(labels)):
            logits = _logits(hidden[part], weight, temperature)
            log_sums[part] = logits.logsumexp(dim=-1)
            log_probs[part] = logits.gather(-1, labels[part, None])[:, 0] - log_sums[part]
            if entropy:
                probs = (logits - log_sums[part, None]).exp_()
                entropies[part] = log_sums[part] - probs.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_sums, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropy = grad_outputs
        out = torch.empty_like(hidden)
        for part in _chunks(len(labels)):
            log_p = _logits(hidden[part], weight, ctx.temperature).sub_(log_sums[part, None])
            # d log p_y / d logit_v = [v = y] - p_v and d H / d logit_v = - p_v (log p_v + H)
            factor = -grad_log_probs[part, None]
            if ctx.entropy:
                factor = factor - grad_entropy[part, None] * (log_p + entropies[part, None])
            dense = log_p.exp_().mul_(factor)
            dense.scatter_add_(1, labels[part, None], grad_log_probs[part, None])
            out[part] = (dense if ctx.temperature == 1 else dense.div_(ctx.temperature)).to(weight.dtype) @ weight
        return out, None, None, None, None


def _chunks(tokens: int) -> Iterator[slice]:
    return (slice(at, at + _CHUNK_TOKENS) for at in range(0, tokens, _CHUNK_TOKENS))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()  # a tensor of its own when the weight is float32, too: nothing else holds it
    return logits if temperature == 1 else logits.div_(temperature)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log softmax(hidden weight^T / temperature)[labels] and the entropies, without the logits ever being whole.

    A chunk of logits exists at a time, and again in backward: the product with `weight` is computed twice.

    Args:
        hidden: [..., D] floating point.
        weight: [V, D] of hidden's dtype, frozen.
        labels: [...] int64, each in [0, V).
        temperature: Above zero.
        entropy: Whether the second result is wanted; else it is zero.

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
    found: Any = _LinearLogProbs.apply(flat, weight, labels.reshape(-1), temperature, entropy)
    return found[0].view(labels.shape), found[1].view(labels.shape)
