"""The difference between actor and rollout log-probs of sampled tokens, as a sum of what causes it.

Along a chain of models that score the same tokens, from the actor to the rollout as it sampled,

    d = (actor - quantized) + (quantized - clean) + (clean - noisy) + (noisy - sampled)
         quantization          kernel                noise             staleness, or kernel

    actor      the actor, before the update
    quantized  the actor with its weights rounded to the rollout's format and back
    clean      the rollout engine as it is now, without noise, in one pass over prompt and answer
    noisy      the same with the noise of this step
    sampled    what the rollout engine said when it sampled

The last link is arithmetic (one token at a time, or all at once) where the weights are still those that sampled, and
counts as kernel; where they have been synchronized since, it is staleness, with that arithmetic in it and, under noise,
the difference of the two draws. A link of a model that is not there has no length: without noise `noisy` is `clean`, a
rollout that is not quantized at a sync (bf16, or a packed base, which the actor holds too) has `quantized` = `actor`.
"""

from typing import NamedTuple

import torch

from verl_qerl.algos.mismatch import check_shapes

PARTS = ("quantization", "kernel", "noise", "staleness")


class Scores(NamedTuple):
    """Log-probs of the same tokens by the five models of the chain, [batch, tokens] each, in nats."""

    actor: torch.Tensor
    clean: torch.Tensor
    sampled: torch.Tensor
    quantized: torch.Tensor | None = None
    noisy: torch.Tensor | None = None


class Part(NamedTuple):
    """One part p of d.

    Attributes:
        abs_diff: Mean of |p| over the tokens, in nats. These do not add up: parts cancel.
        share: sum p d / sum d^2. Over all parts they add up to 1; one may lie outside of [0, 1], where parts cancel.
            NaN where d is 0 everywhere.
    """

    abs_diff: float
    share: float


def mismatch_parts(scores: Scores, mask: torch.Tensor, stale: torch.Tensor) -> dict[str, Part]:
    """Take d = actor - sampled apart.

    Args:
        mask: [batch, tokens], 0 where a token does not count. What stands there, NaN included, has no influence.
        stale: [batch] bool: whether other weights than the present ones sampled the sequence.

    Returns:
        The PARTS that exist: `kernel` always, `quantization` and `noise` where scored, `staleness` where a
        sequence is stale. In float64. Empty where no token counts.

    Raises:
        ValueError: Shapes differ.
    """
    keep = mask.bool()
    check_shapes(keep, {f"scores.{name}": tensor for name, tensor in scores._asdict().items()})
    if not keep.any():
        return {}
    actor, clean, sampled = (tensor[keep].double() for tensor in scores[:3])
    quantized = actor if scores.quantized is None else scores.quantized[keep].double()
    noisy = clean if scores.noisy is None else scores.noisy[keep].double()
    old = stale[:, None].expand_as(keep)[keep]
    last = noisy - sampled
    parts = {"kernel": quantized - clean + torch.where(old, 0.0, last)}
    if scores.quantized is not None:
        parts["quantization"] = actor - quantized
    if scores.noisy is not None:
        parts["noise"] = clean - noisy
    if old.any():
        parts["staleness"] = torch.where(old, last, 0.0)
    whole = actor - sampled
    return {
        name: Part(part.abs().mean().item(), ((part * whole).sum() / whole.square().sum()).item())
        for name, part in parts.items()
    }
