"""Log-probabilities of given tokens from half-precision logits, in float32 and in bounded memory.

Without flash-attn verl takes them token by token: some kernels each, and the time of a small model goes into launching
them. Under autocast a GPU takes them in float32 all the same. A CPU does not: near -4 a bf16 log-probability has steps
of 2**-6, as large as the differences that policy ratios are made of.
"""

from typing import Any

import torch

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
