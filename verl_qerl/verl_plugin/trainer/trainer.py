"""The trainers of verl with Adaptive Quantization Noise, and with what the other mixins of this package add.

Noise is set right before each weight sync: an adapter brings no norms, or trained ones, onto which the worker puts the
noise that is on; their storage stays mapped while the engine sleeps, and verl drops the prefix cache after the sync. So
the rollouts of step t are sampled, from their first token on, with the sigma and the draw of step t.
"""

import logging
from types import ModuleType
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.debug import marked_timer

from verl_qerl import vllm_plugin
from verl_qerl.algos.aqn import AQNConfig, sigma_at_step
from verl_qerl.verl_plugin.config.attention import use_attention
from verl_qerl.verl_plugin.config.base_options import aqn_options
from verl_qerl.verl_plugin.config.rollout_options import WORKER_EXTENSION, use_rollout_options
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
from verl_qerl.verl_plugin.trainer.uaq import UAQMixin
from verl_qerl.vllm_plugin.options import SCHEDULER

logger = logging.getLogger(__name__)

# Trainers whose weight sync runs in `on_step_end`.
_MODES = ("sync", "colocate_async")


def install(module: ModuleType) -> None:
    """Replace the trainers of verl's registry by subclasses; a second call does nothing."""
    registry = module.trainer_base.TRAINER_REGISTRY
    for mode, trainer in list(registry.items()):
        if not issubclass(trainer, NoiseMixin):
            # Engines are asked first. The gate tells the parts of a difference, so it comes after them: they are its
            # super().
            ours = (EngineHealthMixin, MismatchMixin, MismatchPartsMixin, NoiseEffectMixin, NoiseScheduleMixin)
            ours += (NoiseMixin, CheckpointMixin, PolicyLossMixin, UAQMixin, WeightSyncMixin, PollingMixin, CriticMixin)
            bases = (*ours, trainer)
            registry[mode] = type(f"Qerl{trainer.__name__}", bases, {"__doc__": trainer.__doc__})


class NoiseMixin(RolloutWorkersMixin):
    """Hooks of verl's PPOTrainer; does nothing unless `aqn.enabled`."""

    def __init__(self, config: DictConfig) -> None:
        self._aqn = aqn_options(config)
        self._aqn_searched: dict[int, tuple[int, float]] = {}  # as `sigma_at_step` takes it
        if self._aqn.enabled:
            problem = vllm_plugin.version_problem()
            if problem:
                raise RuntimeError(problem)
            mode = config.trainer.v1.trainer_mode
            if mode not in _MODES:
                raise ValueError(
                    f"trainer.v1.trainer_mode={mode} has no noise. Accepted are {', '.join(_MODES)}."
                    " Leave out `+aqn.enabled=true` or change the mode."
                )
            ask_workers_for_noise(config, self._aqn)
        use_rollout_options(config)
        use_attention(config)
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


def ask_workers_for_noise(config: DictConfig, aqn: AQNConfig) -> None:
    """Name our worker extension and hand it the options of AQN, by the door vLLM has for plugins.

    Args:
        config: Of the run, changed in place. A worker extension named by the user stays.
        aqn: Options of the noise.
    """
    options = {name: getattr(aqn, name) for name in aqn.__dataclass_fields__}
    options["targets"] = list(aqn.targets)
    rollout = config.actor_rollout_ref.rollout
    # A call to the workers of a data-parallel engine is not known to reach every shard.
    for name, accepted in (("name", "vllm"), ("data_parallel_size", 1)):
        if rollout.get(name, accepted) != accepted:
            raise ValueError(
                f"actor_rollout_ref.rollout.{name}={rollout[name]} has no noise. Accepted is {accepted}."
                " Leave out `+aqn.enabled=true` or set the value."
            )
    with open_dict(config):
        kwargs = rollout.engine_kwargs.vllm
        kwargs.setdefault("worker_extension_cls", WORKER_EXTENSION)
        if aqn.draw != "batch":
            kwargs.setdefault("scheduler_cls", SCHEDULER)  # which keeps answers out of the prefix cache
        OmegaConf.update(
            config, "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.verl_qerl.aqn", options
        )
