"""How far the rollout is from the actor, measured on the tokens that the rollout sampled; see `mismatch_parts` too.

Per token, with d = log pi_actor - log pi_rollout, the estimator k3 of Schulman, "Approximating KL divergence" (2020),

    KL(rollout || actor) = E_rollout[ exp(d) - 1 - d ]

which has no bias, is never negative, and is d^2 / 2 for small d. The rollout is what sampled: its quantization, its
kernels and, while it is on, its noise are all in the difference; the actor never has noise.

The limits are for what is left without the noise, and with the actor's linears rounded where the rollout's are
quantized at every sync: arithmetic alone, on the same weights. How much that is depends on the model: see
"What is healthy" in verl_plugin/README.md.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Mismatch(NamedTuple):
    """Means over the tokens that count, and their number; without any, the means are NaN."""

    kl_k3: float
    log_prob_abs_diff: float
    num_tokens: int


def rollout_mismatch(rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Compare the log-probs of the sampled tokens.

    Args:
        rollout: [batch, tokens], of the policy that sampled them.
        actor: [batch, tokens], of the policy in training.
        mask: [batch, tokens], 0 where a token does not count. What stands there, NaN included, has no influence.

    Returns:
        In nats, computed in float64: exp(d) - 1 - d cancels. Where a token that counts has NaN or an infinite
        log-prob, the means are not finite.

    Raises:
        ValueError: Shapes differ.
    """
    keep = mask.bool()
    check_shapes(keep, {"log-probs of the rollout": rollout, "log-probs of the actor": actor})
    difference = actor[keep].double() - rollout[keep].double()
    k3 = torch.expm1(difference) - difference
    return Mismatch(k3.mean().item(), difference.abs().mean().item(), difference.numel())


def check_shapes(mask: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise ValueError, with its name, for a tensor of another shape than the mask."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(
                f"{name} and the mask differ: shape={tuple(tensor.shape)}. Accepted is {tuple(mask.shape)}."
                " Pad both alike."
            )


class Undefined(NamedTuple):
    """Tokens that count and have no finite log-prob, the answers they are in, and the first place in an answer."""

    num_tokens: int
    num_answers: int
    first: int


def undefined_log_probs(log_probs: torch.Tensor, mask: torch.Tensor) -> Undefined | None:
    """The places of NaN or infinite log-probs of sampled tokens; None if all that count are finite.

    Args:
        log_probs: [batch, tokens].
        mask: [batch, tokens], 0 where a token does not count.
    """
    wrong = ~log_probs.isfinite() & mask.bool()
    if not wrong.any():
        return None
    return Undefined(int(wrong.sum()), int(wrong.any(1).sum()), int(wrong.any(0).nonzero()[0]))
