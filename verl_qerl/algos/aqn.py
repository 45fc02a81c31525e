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
from typing import Any

import numpy as np
import torch

from verl_qerl.algos.options import read_switched

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
# prompt too; 0 are the clean weights.
FORCED_DRAW = "aqn_row"


@dataclass(frozen=True)
class AQNConfig:
    """Options of Adaptive Quantization Noise; every default is the paper's (table 4, figure 9).

    Attributes:
        sigma_start: Standard deviation at stage 1, > 0, in the unit that `mode` says.
        sigma_end: Standard deviation at the last stage, in (0, sigma_start].
        num_stages: K >= 2, the first of which is free of noise.
        schedule: `exponential`, `linear`, `cosine` or `logarithmic`.
        mode: `additive` (w + Z), `multiplicative` (w (1 + Z)) or `relative` (w + RMS(w) Z).
        targets: Names of the norms that get noise, the last part of the module's name.
        seed: Seed of the draws; step and name of the norm enter too.
        total_steps: M, the steps that the stages are spread over, after which sigma of step M stays (sigma_end, where M
            is at least num_stages); None: all of the run's.
        target_kl: KL(with noise || without) in nats per token, in (0, 1], that the noise of stage 1 causes. Its sigma
            is searched for, before each stage anew, and falls from there as the schedule does. None: sigma is what
            the schedule says.
        draw: Who shares a draw: all rollouts of a step (`batch`), the tokens of an answer (`sequence`), or nobody, each
            forward pass having its own (`token`).
    """

    enabled: bool = False
    sigma_start: float = 1e-2
    sigma_end: float = 5e-4
    num_stages: int = 10
    schedule: str = "exponential"
    mode: str = "additive"
    targets: tuple[str, ...] = TARGETS
    seed: int = 0
    total_steps: int | None = None
    target_kl: float | None = None
    draw: str = "batch"

    def __post_init__(self) -> None:
        for name, value, kind in (("enabled", self.enabled, bool), ("seed", self.seed, int)):
            if type(value) is not kind:
                raise _bad(name, value, f"a {kind.__name__}")
        for name in ("sigma_start", "sigma_end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise _bad(name, value, "a number in (0, 1); to switch noise off, leave out `+aqn.enabled=true`")
        if self.sigma_end > self.sigma_start:
            raise _bad("sigma_end", self.sigma_end, f"at most sigma_start={self.sigma_start}, since noise decays")
        if type(self.num_stages) is not int or self.num_stages < 2:
            raise _bad("num_stages", self.num_stages, "an integer of at least 2: one stage without noise, one with")
        if self.total_steps is not None and (type(self.total_steps) is not int or self.total_steps < 1):
            raise _bad("total_steps", self.total_steps, "a number of steps, or null for all of the run's")
        target = self.target_kl
        if target is not None and (type(target) not in (int, float) or not 0 < target <= 1):
            raise _bad("target_kl", target, "a KL in (0, 1], in nats per token, or null for the sigma of the schedule")
        if self.schedule not in SCHEDULES:
            raise _bad("schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        if self.mode not in MODES:
            raise _bad("mode", self.mode, f"one of {', '.join(MODES)}")
        if self.draw not in DRAWS:
            raise _bad("draw", self.draw, f"one of {', '.join(DRAWS)}")
        is_list = isinstance(self.targets, list | tuple) and len(self.targets) > 0
        if not is_list or not all(isinstance(target, str) for target in self.targets):
            raise _bad("targets", self.targets, "a list of norm names such as [input_layernorm]")
        object.__setattr__(self, "targets", tuple(self.targets))

    @classmethod
    def from_mapping(cls, options: dict[str, Any] | None) -> "AQNConfig":
        """Read the `aqn` node of a configuration; None gives the defaults (off).

        Raises:
            ValueError: An option is unknown, out of range, or without effect.
        """
        return read_switched(cls, "aqn", options)


def stage_at_step(step: int, total_steps: int, num_stages: int) -> int:
    """Stage k in [0, K-1] of training step 1 .. total_steps; stages differ in length by at most one step.

    Raises:
        ValueError: The step lies outside of training.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step={step} is outside of training. Steps run from 1 to total_steps={total_steps}.")
    return (step - 1) * num_stages // total_steps


def stage_of(config: AQNConfig, step: int, total_steps: int) -> int:
    """Stage of training step `step` (from 1) under a schedule; arguments and errors as `sigma_at_step`."""
    if config.total_steps is not None:
        step, total_steps = min(step, config.total_steps), config.total_steps
    return stage_at_step(step, total_steps, config.num_stages)


def sigma_at_step(
    config: AQNConfig, step: int, total_steps: int, searched: Mapping[int, tuple[int, float]] | None = None
) -> float:
    """Standard deviation of the noise while the rollouts of training step `step` (from 1) are sampled.

    Args:
        config: Options; its `total_steps` comes before the argument.
        step: From 1.
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
        return config.sigma_end  # without the rounding of the formulas; with K = 2 the only stage with noise
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
        mode: `additive`, `multiplicative` or `relative`.

    Returns:
        The shape of `noise`, float32.
    """
    if sigma == 0.0:
        return clean
    if mode == "multiplicative":
        return clean * (1.0 + sigma * noise)
    return clean + (sigma if mode == "additive" else (sigma * norm_rms(clean)).float()) * noise


def _bad(name: str, value: object, accepted: str) -> ValueError:
    return ValueError(f"aqn.{name}={value!r} is out of range. Accepted is {accepted}. Set `+aqn.{name}=...` anew.")
