"""Log-probabilities of given tokens from half-precision logits, in float32 and in bounded memory.

Without flash-attn verl takes them token by token: some kernels each, and the time of a small model goes into launching
them. Under autocast a GPU takes them in float32 all the same. A CPU does not: near -4 a bf16 log-probability has steps
of 2**-6, as large as the differences that policy ratios are made of.
"""

from typing import Any

import torch

from verl_qerl.kernels.actor.logit_rows import gradient_of_rows, score_rows

# Tokens whose float32 logits exist at a time: 0.6 GB for a vocabulary of 152k.
_CHUNK_TOKENS = 1024


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks = zip(logits.split(_CHUNK_TOKENS), labels.split(_CHUNK_TOKENS), strict=True)
        scored = [score_rows(part, chosen, temperature=1.0, entropy=False) for part, chosen in chunks]
        log_probs, log_sums, _ = (torch.cat(parts) for parts in zip(*scored, strict=True))
        ctx.save_for_backward(logits, labels, log_sums)
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        chunks = zip(*(x.split(_CHUNK_TOKENS) for x in (*ctx.saved_tensors, *grad_outputs)), strict=True)
        parts = [gradient_of_rows(x, labels, 1.0, (sums, sums), (grad, None)) for x, labels, sums, grad in chunks]
        return torch.cat(parts), None


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
