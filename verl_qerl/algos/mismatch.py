"""How far the rollout is from the actor, from the tokens that the rollout sampled; `mismatch_parts` takes it apart.

Per token, with d = log pi_actor - log pi_rollout, the estimator k3 of Schulman, "Approximating KL divergence" (2020),

    KL(rollout || actor) = E_rollout[ exp(d) - 1 - d ]

which has no bias, is never negative, and is d^2 / 2 for small d. The rollout is what sampled: its quantization, its
kernels and, while it is on, its noise are all in the difference; the actor never has noise.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from verl_qerl.algos.options import read_options

# Default of `max_initial_kl` where both sides multiply by the same dense weights: what a 105 M parameter model loses in
# NVFP4 is 0.02 to 0.04, so that weights wrong by as much as the error of the format do not pass.
SAME_WEIGHTS_KL = 0.02


@dataclass(frozen=True)
class MismatchConfig:
    """Options of the comparison: the gate at the first step, and the parts of the difference.

    Attributes:
        max_initial_kl: KL(rollout || actor) > 0 in nats per token, above which the run is stopped; None never stops it.
            A sound rollout of 105 M parameters on GSM8K has 0.8e-4 in bf16, 1.4e-4 in NVFP4, and at most 4.4e-4 with
            noise of sigma 0.01, as after a resume. Broken ones of a trained model of two layers
            (tests/bench/results/cpu/broken_rollout.json): 0.12 to 5.6 with wrong bits in one linear, 0.010 to 0.8 with
            a factor of 2 or 1/2 on one kind of linears, 0.02 with 1.1 on all. The default lies far above the sound
            ones, since no larger model was measured, and below wrong bits: it stops garbage, not small errors, and
            nothing on an untrained model, whose tokens are all about as likely. Where both sides hold the same dense
            weights it is SAME_WEIGHTS_KL.
        mismatch_sample: Sequences of each step whose difference is taken apart (`algos.mismatch_parts`); 0 for none.
    """

    max_initial_kl: float | None = 0.05
    mismatch_sample: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: One sentence that names the option, its value and what is accepted.
        """
        value = self.max_initial_kl
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < math.inf):
            raise ValueError(
                f"qerl.max_initial_kl={value!r} is out of range. Accepted is a number above 0, or null, which switches"
                " the gate off. Correct the option."
            )
        if type(self.mismatch_sample) is not int or self.mismatch_sample < 0:
            raise ValueError(
                f"qerl.mismatch_sample={self.mismatch_sample!r} is out of range. Accepted is a number of sequences, 0"
                " for none. Correct the option."
            )

    @classmethod
    def from_mapping(cls, options: Any) -> "MismatchConfig":
        """From the `qerl` node of a configuration; None gives the defaults.

        Raises:
            ValueError: An option is unknown or out of range.
        """
        return read_options(cls, "qerl", options, "+qerl.max_initial_kl=0.1")


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
    for name, tensor in (("rollout", rollout), ("actor", actor)):
        if tensor.shape != keep.shape:
            raise ValueError(
                f"log-probs of the {name} and the mask differ: shape={tuple(tensor.shape)}."
                f" Accepted is {tuple(keep.shape)}. Pad both alike."
            )
    difference = actor[keep].double() - rollout[keep].double()
    k3 = torch.expm1(difference) - difference
    return Mismatch(k3.mean().item(), difference.abs().mean().item(), difference.numel())


class Undefined(NamedTuple):
    """Tokens that count and have no finite log-prob, the answers they are in, and the first place in an answer."""

    num_tokens: int
    num_answers: int
    first: int


def undefined_log_probs(log_probs: torch.Tensor, mask: torch.Tensor) -> Undefined | None:
    """Where log-probs of sampled tokens are NaN or infinite; None where all that count are finite.

    Args:
        log_probs: [batch, tokens].
        mask: [batch, tokens], 0 where a token does not count.
    """
    wrong = ~log_probs.isfinite() & mask.bool()
    if not wrong.any():
        return None
    return Undefined(int(wrong.sum()), int(wrong.any(1).sum()), int(wrong.any(0).nonzero()[0]))
