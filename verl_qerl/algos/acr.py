"""ACR, the Adaptive Clipping Range of QuRL (arXiv 2602.13953, equation 9).

Three policies: theta is trained; prox is the actor in full precision as it was before the update (old_log_probs);
behav is the quantized rollout that sampled the tokens (rollout_log_probs). Per token, with R = pi_theta / pi_prox,

    E[ min(pi_prox / pi_behav, C) * min(R A, clip(R, 1 - eps_low, (1 + eps_high) / r) A) ]
    r = min(1, C * pi_behav / pi_prox)

Truncating the first factor alone (TIS) is the same as sampling from another behaviour policy, under which the trust
region shrinks by r. ACR divides the upper bound by r, so that tokens with A > 0 whose factor was truncated keep their
range; where pi_prox / pi_behav <= C it is TIS, and where all three policies are equal it is PPO. A < 0 never meets the
upper bound. The paper prints one eps; eps_low and eps_high are DAPO's, and the dual clip for A < 0 is that of verl's
vanilla loss (arXiv 1912.09729).

The paper's text was not at hand: the equation is the one on which its published summaries agree.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from verl_qerl.algos.mismatch import check_shapes
from verl_qerl.algos.options import Accepts, Options, is_number, option

# Log-ratios are clamped as in verl's losses. exp(20) = 5e8, so that a larger C never truncates.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ACRConfig(Options):
    """Options of ACR.

    Attributes:
        max_ratio: C >= 1, where pi_prox / pi_behav is truncated. QuRL takes it from Flash-RL, which uses 2 on GSM8K and
            8 for DAPO; no value is printed in what we could read of QuRL.
    """

    NODE: ClassVar[str] = "acr"

    max_ratio: float = option(
        2.0,
        Accepts("a number of at least 1, at which equal policies are left alone", lambda v: is_number(v) and v >= 1),
    )


@dataclass(frozen=True)
class ClipRange:
    """How the ratio of PPO is clipped.

    Attributes:
        low: eps_low; the lower bound is 1 - low.
        high: eps_high; the upper bound is 1 + high before ACR widens it.
        dual: c > 1 of the dual clip: with A < 0 the loss is at most c |A|.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0


class LogProbs(NamedTuple):
    """Log-probabilities of the sampled tokens under the three policies, each [batch, tokens]."""

    theta: torch.Tensor
    prox: torch.Tensor
    behav: torch.Tensor


def acr_loss(
    log_probs: LogProbs, advantages: torch.Tensor, mask: torch.Tensor, clip: ClipRange, max_ratio: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss per token, and metrics.

    Args:
        log_probs: Log-probs under the three policies; only theta gets gradients.
        advantages: [batch, tokens].
        mask: [batch, tokens], 0 where a token does not count. What stands there, NaN included, has no influence.

    Returns:
        The loss to be minimized, [batch, tokens] float32, 0 where masked; and means over the tokens that count:
        `actor/pg_clipfrac`, `actor/pg_clipfrac_lower` and `actor/ppo_kl` as verl's vanilla loss defines them, and

        - `actor/acr_ratio`: pi_prox / pi_behav, truncated at C;
        - `actor/acr_widened_frac`: share of tokens with r < 1;
        - `actor/acr_upper_bound`: (1 + eps_high) / r;
        - `actor/acr_freed_frac`: share of tokens with A > 0 that PPO's bound would clip and the wider one does not.

    Raises:
        ValueError: Shapes differ.
    """
    keep = mask.bool()
    inputs = log_probs._asdict() | {"advantages": advantages}
    check_shapes(keep, inputs)
    # Before any arithmetic: a NaN that is multiplied by 0 afterwards is still one, in the gradient too.
    theta, prox, behav, advantages = (torch.where(keep, x, torch.zeros_like(x)).float() for x in inputs.values())
    log_ratio = (theta - prox.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    behav_ratio = (prox - behav).detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    widening = (behav_ratio / max_ratio).clamp(min=1.0)  # 1 / r
    upper = (1 + clip.high) * widening
    truncated = behav_ratio.clamp(max=max_ratio)

    ratio = log_ratio.exp()
    plain = -advantages * ratio
    # One clamp, and no minimum with `upper`: on a bound the gradient is then that of verl's vanilla loss.
    clipped = -advantages * torch.clamp(ratio, torch.full_like(upper, 1 - clip.low), upper)
    upper_clipped = torch.maximum(plain, clipped)
    most = -advantages * clip.dual
    loss = torch.where(advantages < 0, torch.min(most, upper_clipped), upper_clipped) * truncated

    freed = (advantages > 0) & (ratio > 1 + clip.high) & (ratio <= upper)
    per_token = {
        "actor/pg_clipfrac": clipped > plain,
        "actor/pg_clipfrac_lower": (upper_clipped > most) & (advantages < 0),
        "actor/ppo_kl": -log_ratio,
        "actor/acr_ratio": truncated,
        "actor/acr_widened_frac": widening > 1,
        "actor/acr_upper_bound": upper,
        "actor/acr_freed_frac": freed,
    }
    return loss, _masked_means(per_token, keep)


def _masked_means(per_token: dict[str, torch.Tensor], keep: torch.Tensor) -> dict[str, float]:
    """Means over the tokens that count; one transfer from the device for all.

    verl averages over micro-batches, and rejection may leave one without a token. Its means are those of a token on
    which all policies agree, as masked tokens are here: a ratio of 0 would pull the average away from 1.
    """
    keep = keep | ~keep.any()
    count = keep.sum().clamp(min=1)
    with torch.no_grad():
        means = torch.stack([torch.where(keep, x.float(), 0.0).sum() / count for x in per_token.values()])
    return dict(zip(per_token, means.tolist(), strict=True))
