"""Adaptive Quantization Noise (QeRL, arXiv 2510.11696, section 3.3 and algorithm 1).

Training of M steps is cut into K equal stages. Stage 0 samples without noise; stage k = 1 .. K-1 adds
Z ~ N(0, sigma_k^2) to the RMSNorm weights of the sampling model, with equation 8

    sigma_k = sigma_start * (sigma_end / sigma_start) ^ ((k - 1) / (K - 2))

The paper prints K - 1 in the exponent's denominator, which never reaches sigma_end; its code, and this, use K - 2.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from verl_qerl.algos.options import SWITCH, Accepts, Options, is_names, is_number, one_of, option

# t = (k - 1) / n with n = K - 2 intervals: 0 at stage 1, below 1 up to stage K - 2.
_SCHEDULES: dict[str, Callable[[float, float, float, int], float]] = {
    "exponential": lambda start, end, t, n: start * (end / start) ** t,
    "linear": lambda start, end, t, n: start + (end - start) * t,
    "cosine": lambda start, end, t, n: end + (start - end) * (1 + math.cos(math.pi * t)) / 2,
    "logarithmic": lambda start, end, t, n: start + (end - start) * math.log1p(t * n) / math.log1p(n),
}
SCHEDULES = tuple(_SCHEDULES)
MODES = ("additive", "multiplicative", "relative")
DRAWS = ("batch", "sequence", "token")
TARGETS = ("input_layernorm", "post_attention_layernorm")
# Draws of each norm where answers or tokens have draws of their own: 4 bytes for every column, 52 MB in all for 7B.
NUM_DRAWS = 64
# A request with SamplingParams(extra_args={FORCED_DRAW: n}) has the nth of them for all of its tokens, those of the
# prompt too, or for those from position FORCED_FROM on; 0 are the clean weights.
FORCED_DRAW, FORCED_FROM = "aqn_row", "aqn_from"
_SIGMA = Accepts(
    "a number in (0, 1); to switch noise off, leave out `+aqn.enabled=true`", lambda v: is_number(v) and 0 < v < 1
)


@dataclass(frozen=True)
class AQNConfig(Options):
    """Options of Adaptive Quantization Noise; every default is the paper's (table 4, figure 9).

    Attributes:
        sigma_start: Standard deviation at stage 1, > 0, in the unit that `mode` says.
        sigma_end: Standard deviation at the last stage, in (0, sigma_start].
        num_stages: K >= 2, the first of which is free of noise.
        mode: `additive` (w + Z), `multiplicative` (w (1 + Z)) or `relative` (w + RMS(w) Z).
        targets: Names of the norms that get noise, the last part of the module's name. None: the paper's, in models
            that are known to have them where attention and MLP read them.
        seed: Seed of the draws; step and name of the norm enter too.
        total_steps: M, the steps that the stages are spread over, after which sigma of step M stays (sigma_end, where M
            is at least num_stages); None: all of the run's.
        target_kl: KL(with noise || without) in nats per token, in (0, 1], that the noise of stage 1 causes. Its sigma
            is searched for, before each stage anew, and falls from there as the schedule does. None: sigma is what
            the schedule says.
        draw: Who shares a draw: all rollouts of a step (`batch`), the tokens of an answer (`sequence`), or nobody, each
            forward pass having its own (`token`).
    """

    NODE: ClassVar[str] = "aqn"

    enabled: bool = option(False, SWITCH)
    sigma_start: float = option(1e-2, _SIGMA)
    sigma_end: float = option(5e-4, _SIGMA)
    num_stages: int = option(
        10,
        Accepts("an integer of at least 2: one stage without noise, one with", lambda v: type(v) is int and v >= 2),
    )
    schedule: str = option("exponential", one_of(*SCHEDULES))
    mode: str = option("additive", one_of(*MODES))
    targets: tuple[str, ...] | None = option(
        None,
        Accepts(
            "a list of norm names such as [input_layernorm], or null for the paper's",
            lambda v: v is None or (is_names(v) and len(v) > 0),
        ),
    )
    seed: int = option(0, Accepts("an integer", lambda v: type(v) is int))
    total_steps: int | None = option(
        None,
        Accepts("a number of steps, or null for all of the run's", lambda v: v is None or (type(v) is int and v >= 1)),
    )
    target_kl: float | None = option(
        None,
        Accepts(
            "a KL in (0, 1], in nats per token, or null for the sigma of the schedule",
            lambda v: v is None or (is_number(v) and 0 < v <= 1),
        ),
    )
    draw: str = option("batch", one_of(*DRAWS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_end > self.sigma_start:
            raise self._refused("sigma_end", f"at most sigma_start={self.sigma_start}, since noise decays")
        if self.num_stages == 2 and self.target_kl is None and self.sigma_end != self.sigma_start:
            raise self._refused("sigma_end", f"sigma_start={self.sigma_start}: num_stages=2 has one stage with noise")
        if self.targets is not None:
            object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def norms(self) -> tuple[str, ...]:
        """`targets`, or the paper's."""
        return TARGETS if self.targets is None else self.targets


def stage_of(config: AQNConfig, step: int, total_steps: int) -> int:
    """Stage k in [0, K-1] of training step `step` (from 1); stages differ in length by at most one step.

    Args:
        total_steps: Steps of the run; `config.total_steps` comes before it.

    Raises:
        ValueError: The step lies outside of training.
    """
    if config.total_steps is not None:
        step, total_steps = min(step, config.total_steps), config.total_steps
    if not 1 <= step <= total_steps:
        raise ValueError(f"step={step} is outside of training. Steps run from 1 to total_steps={total_steps}.")
    return (step - 1) * config.num_stages // total_steps


def sigma_at_step(
    config: AQNConfig, step: int, total_steps: int, searched: Mapping[int, tuple[int, float]] | None = None
) -> float:
    """Standard deviation of the noise while the rollouts of training step `step` (from 1) are sampled.

    Args:
        total_steps: Steps of the run; `config.total_steps` comes before it.
        searched: With `target_kl`: stage -> (first step, the sigma that stands in for that of stage 1). A stage that is
            not there has no noise, nor has a step before the first. None: the schedule alone.

    Raises:
        ValueError: The step lies outside of training.
    """
    stage = stage_of(config, step, total_steps)
    if not config.enabled or stage == 0:
        return 0.0
    if config.target_kl is not None and searched is not None:
        since, sigma = searched.get(stage, (math.inf, 0.0))
        return sigma * _sigma_of_stage(config, stage) / _sigma_of_stage(config, 1) if step >= since else 0.0
    return _sigma_of_stage(config, stage)


def _sigma_of_stage(config: AQNConfig, stage: int) -> float:
    if stage == config.num_stages - 1:
        return config.sigma_end  # without the rounding of the formulas
    intervals = config.num_stages - 2
    return _SCHEDULES[config.schedule](config.sigma_start, config.sigma_end, (stage - 1) / intervals, intervals)


def draw_noise(seed: int, step: int, name: str, size: int) -> torch.Tensor:
    """Standard normal numbers that depend on (seed, step, name) and on nothing else.

    Philox, a counter-based generator in scalar code: the same on every rank, replica and kind of processor, which the
    vectorized generators of torch do not promise.

    Returns:
        [size] float32 on the CPU.
    """
    key = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32))


def norm_rms(weight: torch.Tensor) -> torch.Tensor:
    """sqrt(mean(w^2)) of a norm's weight [K], in float64 on its device: in float32 the order of a sum would show."""
    return weight.double().square().mean().sqrt()


def noisy_weight(clean: torch.Tensor, noise: torch.Tensor, sigma: float, mode: str) -> torch.Tensor:
    """The weight to sample with: w + sigma Z, w (1 + sigma Z), or w + sigma RMS(w) Z.

    Args:
        clean: [K] float32, the norm's weight w.
        noise: [..., K] float32, Z of unit variance.
        sigma: Standard deviation; 0 returns `clean` itself.

    Returns:
        The shape of `noise`, float32.
    """
    if sigma == 0.0:
        return clean
    if mode == "multiplicative":
        return clean * (1.0 + sigma * noise)
    return clean + (sigma if mode == "additive" else (sigma * norm_rms(clean)).float()) * noise
