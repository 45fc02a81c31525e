"""The trainers of verl with Adaptive Quantization Noise, and with what the other mixins of this package add.

Noise is set right before each weight sync: an adapter brings no norms, or trained ones, onto which the worker puts the
noise that is on; their storage stays mapped while the engine sleeps, and verl drops the prefix cache after the sync. So
the rollouts of step t are sampled, from their first token on, with the sigma and the draw of step t.
"""

import logging
from types import ModuleType
from typing import Any

import ray
from omegaconf import DictConfig
from verl.utils.debug import marked_timer

from verl_qerl.algos.aqn import sigma_at_step
from verl_qerl.verl_plugin.config.apply import aqn_options, prepare
from verl_qerl.verl_plugin.trainer.checkpoints import CheckpointMixin
from verl_qerl.verl_plugin.trainer.critic import CriticMixin
from verl_qerl.verl_plugin.trainer.engine_health import EngineHealthMixin
from verl_qerl.verl_plugin.trainer.mismatch import MismatchMixin
from verl_qerl.verl_plugin.trainer.mismatch_parts import MismatchPartsMixin
from verl_qerl.verl_plugin.trainer.noise_effect import NoiseEffectMixin
from verl_qerl.verl_plugin.trainer.noise_schedule import NoiseScheduleMixin
from verl_qerl.verl_plugin.trainer.policy_loss import PolicyLossMixin
from verl_qerl.verl_plugin.trainer.polling import PollingMixin
from verl_qerl.verl_plugin.trainer.rollout_workers import RolloutWorkersMixin
from verl_qerl.verl_plugin.trainer.sync_check import WeightSyncMixin

logger = logging.getLogger(__name__)


def install(module: ModuleType) -> None:
    """Replace the trainers of verl's registry by subclasses; a second call does nothing."""
    registry = module.trainer_base.TRAINER_REGISTRY
    for mode, trainer in list(registry.items()):
        if not issubclass(trainer, NoiseMixin):
            # Engines are asked first. The gate tells the parts of a difference, so it comes after them: they are its
            # super().
            ours = (PreparedMixin, EngineHealthMixin, MismatchMixin, MismatchPartsMixin, NoiseEffectMixin)
            ours += (
                NoiseScheduleMixin,
                NoiseMixin,
                CheckpointMixin,
                PolicyLossMixin,
                WeightSyncMixin,
                PollingMixin,
                CriticMixin,
            )
            bases = (*ours, trainer)
            registry[mode] = type(f"Qerl{trainer.__name__}", bases, {"__doc__": trainer.__doc__})


class PreparedMixin(RolloutWorkersMixin):
    """Comes first: what the options of a run mean is written into its configuration before anything reads that."""

    def __init__(self, config: DictConfig) -> None:
        prepare(config)
        super().__init__(config)


class NoiseMixin(RolloutWorkersMixin):
    """Hooks of verl's PPOTrainer; does nothing unless `aqn.enabled`."""

    def __init__(self, config: DictConfig) -> None:
        self._aqn = aqn_options(config)
        self._aqn_searched: dict[int, tuple[int, float]] = {}  # as `sigma_at_step` takes it
        super().__init__(config)

    def on_init_end(self) -> None:
        """Noise of the first step, then the first weight sync."""
        self._warn_of_skipped_stages()
        self._set_noise(self.global_steps + 1)
        super().on_init_end()

    def on_step_end(self) -> None:
        """Noise of the next step (none after the last), then the weight sync."""
        used = self._sigma(self.global_steps)
        if self._aqn.enabled:
            with marked_timer("set_noise", self.timing_raw, color="red"):
                self._set_noise(self.global_steps + 1)
        super().on_step_end()
        if self._aqn.enabled:
            self._add_metrics({"aqn/sigma": used})

    def on_validate_begin(self) -> None:
        """Validation samples from the clean model."""
        self._switch_noise(0.0, 0)
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        """The noise that was on before comes back, draw included."""
        super().on_validate_end()
        # Before training, global_steps is the last finished step; in the loop, the step that just ended.
        self._switch_noise(self._sigma(self.global_steps + 1), self.global_steps + 1)

    def _sigma(self, step: int) -> float:
        inside = 1 <= step <= self.total_training_steps
        return sigma_at_step(self._aqn, step, self.total_training_steps, self._aqn_searched) if inside else 0.0

    def _set_noise(self, step: int) -> None:
        if self._aqn.enabled:
            self._call_workers("qerl_set_noise", sigma=self._sigma(step), step=step)

    def _switch_noise(self, sigma: float, step: int) -> None:
        if self._aqn.enabled:
            self._call_workers("qerl_set_noise", sigma=sigma, step=step)
            ray.get([server.qerl_clear_kv_cache.remote() for server in self._servers()])

    def _call_workers(self, method: str, **kwargs: Any) -> int:
        """Number of norms that every worker of every replica has set, to the same weights."""
        answers = set(map(tuple, self._ask_workers(method, **kwargs)))
        counts = sorted({count for count, _ in answers})
        if len(counts) != 1 or not counts[0]:
            raise RuntimeError(
                f"the rollout workers set {counts} norms. All must set the same number, at least one."
                " Check that every node has the same verl_qerl installed."
            )
        if len(answers) != 1:
            raise RuntimeError(
                f"the rollout workers set {counts[0]} norms to {len(answers)} different sets of weights at"
                f" {kwargs}. All must sample with the same noise. Check that every node has the same versions of"
                " verl_qerl and numpy."
            )
        return counts[0]

    def _warn_of_skipped_stages(self) -> None:
        total = self._aqn.total_steps or self.total_training_steps
        if self._aqn.enabled and total < self._aqn.num_stages:
            logger.warning(
                "aqn.num_stages=%d exceeds the %d steps that the stages are spread over: some are skipped, the last of"
                " them too, and sigma ends at %g instead of sigma_end=%g.",
                *(self._aqn.num_stages, total, sigma_at_step(self._aqn, total, total), self._aqn.sigma_end),
            )
