"""How far the rollout is from the actor, from the tokens that the rollout sampled; `mismatch_parts` takes it apart.

Per token, with d = log pi_actor - log pi_rollout, the estimator k3 of Schulman, "Approximating KL divergence" (2020),

    KL(rollout || actor) = E_rollout[ exp(d) - 1 - d ]

which has no bias, is never negative, and is d^2 / 2 for small d. The rollout is what sampled: its quantization, its
kernels and, while it is on, its noise are all in the difference; the actor never has noise.

The limits are for what is left without the noise, and with the actor's linears rounded where the rollout's are
quantized at every sync: arithmetic alone, on the same weights. How much that is depends on the model:

    pretrained Llama of 135M, CPU            2.4e-3 in NVFP4; its bf16 engine has 2.6e-3 against transformers in bf16
    Qwen2.5-Coder-1.5B-Instruct, H200        2e-4 to 6e-4 in NVFP4, 2e-3 with all weights in INT8, rounding in it
    105M trained on GSM8K from nothing       1.4e-4 in NVFP4, 0.8e-4 in bf16
    Qwen3-MoE, random weights                4.5e-3: routers flip
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from verl_qerl.algos.options import read_options

# Default of `max_initial_kl` where both sides multiply by the same dense weights: what a 105 M parameter model loses in
# NVFP4 is 0.02 to 0.04 (a pretrained one of 135 M 0.23), so that weights wrong by as much do not pass.
SAME_WEIGHTS_KL = 0.02
# Default of `max_kl` is so many times `max_initial_kl`.
LATER_STEPS = 5


@dataclass(frozen=True)
class MismatchConfig:
    """Options of the comparison: the gate at the first step, the limit of later ones, the parts of the difference.

    Attributes:
        max_initial_kl: KL(rollout || actor) > 0 in nats per token, without noise and with weights rounded alike, above
            which the first step of a run stops it; None never stops it. Broken rollouts of a trained model of two
            layers (tests/bench/results/cpu/broken_rollout.json) have 0.12 to 5.6 with wrong bits in one linear, 0.010
            to 0.8 with a factor of 2 or 1/2 on one kind of linears, 0.02 with 1.1 on all. The default lies far above
            sound ones and below wrong bits: it stops garbage, not small errors, and nothing on an untrained model,
            whose tokens are all about as likely. Where both sides multiply by the same dense weights it is
            SAME_WEIGHTS_KL.
        max_kl: The same for later steps: the first above it is warned of, the second in a row stops the run.
        mismatch_sample: Sequences of each step whose difference is taken apart (`algos.mismatch_parts`); 0 for none.
    """

    max_initial_kl: float | None = 0.05
    max_kl: float | None = 0.25
    mismatch_sample: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: One sentence that names the option, its value and what is accepted.
        """
        for name, off in (("max_initial_kl", "switches the gate off"), ("max_kl", "never stops a later step")):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ValueError(
                    f"qerl.{name}={value!r} is out of range. Accepted is a number above 0, or null, which {off}."
                    " Correct the option."
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
