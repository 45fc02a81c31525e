"""The KL that noise causes, from the tokens of a sample, and the sigma that causes a wanted one."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIGMA_BOUNDS = (1e-6, 1.0)
_TOLERANCE = 0.05  # of the KL, relative
_MAX_TRIES = 10
_MAX_STEP = math.log(10)  # between two tries: far from the target KL does not grow as sigma^2


def noise_kl(sampled: torch.Tensor, noisy: torch.Tensor, clean: torch.Tensor) -> float:
    """Estimate of KL(noisy || clean) in nats per token, over tokens that a third policy has sampled.

    With b the probability of a token by the policy that sampled it, p with the noise and q without, the mean of

        (p log(p / q) - p + q) / b

    is KL(p || q) on average, whatever b is, since p and q both sum to 1; and no term is negative. For tokens sampled
    with the noise (b = p) it is the estimator k3, q/p - 1 - log(q/p).

    Args:
        sampled: [T] log-probs by the policy that sampled the tokens.
        noisy: [T] with the noise asked about.
        clean: [T] without noise.

    Returns:
        The mean; NaN of no tokens, inf where a ratio is beyond float64.
    """
    sampled, noisy, clean = (one.double() for one in (sampled, noisy, clean))
    log_ratio = noisy - clean
    terms = (noisy - sampled).exp() * (log_ratio + torch.expm1(-log_ratio))
    return float(terms.mean())


@dataclass(frozen=True)
class Searched:
    """What a search for sigma has found.

    Attributes:
        sigma: The best of those tried.
        kl: What it causes, as measured.
        bound: The bound that keeps it from the target, or None.
    """

    sigma: float
    kl: float
    tries: int
    bound: float | None = None


def search_sigma(measure: Callable[[float], float], target: float, start: float) -> Searched:
    """Find a sigma that causes a KL within 5 % of a target: secants of log KL over log sigma, within SIGMA_BOUNDS.

    The first secant has the slope 2, since a small noise causes a KL that grows with its square. Once there is a sigma
    on either side, a step that leaves them halves the distance.

    Args:
        measure: sigma -> KL; what is not finite counts as too much, and 0 or less as too little.
        target: > 0.
        start: Where to begin; > 0.

    Returns:
        The best of at most ten tries, which need not be within 5 % where the measurement is not smooth.
    """
    lowest, highest = SIGMA_BOUNDS
    tried: list[tuple[float, float]] = []
    sigma = min(max(start, lowest), highest)
    while len(tried) < _MAX_TRIES:
        kl = measure(sigma)
        tried.append((sigma, kl))
        if abs(kl / target - 1) <= _TOLERANCE:
            return Searched(sigma, kl, len(tried))
        if sigma == (highest if kl < target else lowest):
            return Searched(sigma, kl, len(tried), bound=sigma)
        sigma = min(max(_next_sigma(tried, target), lowest), highest)
    sigma, kl = min(tried, key=lambda one: abs(_log(one[1]) - math.log(target)))
    return Searched(sigma, kl, len(tried))


def _next_sigma(tried: list[tuple[float, float]], target: float) -> float:
    (sigma, kl), slope = tried[-1], 2.0
    if len(tried) > 1:
        rise = _log(kl) - _log(tried[-2][1])
        run = math.log(sigma) - math.log(tried[-2][0])  # 0 where a sigma is tried again
        slope = rise / run if run else 0.0
        if not 0.5 <= slope <= 8:  # of two measurements that are near each other, or of one that is not finite
            slope = 2.0
    factor = math.exp(min(max((math.log(target) - _log(kl)) / slope, -_MAX_STEP), _MAX_STEP))
    below = max((at for at, found in tried if found < target), default=None)
    above = min((at for at, found in tried if not found < target), default=None)
    if below and above and not below < sigma * factor < above:
        return math.sqrt(below * above)
    return sigma * factor


def _log(kl: float) -> float:
    return math.log(min(max(kl, 1e-300), 1e300)) if not math.isnan(kl) else math.log(1e300)
