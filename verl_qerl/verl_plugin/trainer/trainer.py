"""verl's trainers with features: one subclass of each overrides a method once and calls the features in one order."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl_qerl.verl_plugin.config import apply
from verl_qerl.verl_plugin.trainer.checkpoints import WholeCheckpoints
from verl_qerl.verl_plugin.trainer.critic import CriticWithoutMark
from verl_qerl.verl_plugin.trainer.engine_health import EngineHealth
from verl_qerl.verl_plugin.trainer.feature import Feature, Run
from verl_qerl.verl_plugin.trainer.mismatch import Gate, gate_options
from verl_qerl.verl_plugin.trainer.mismatch_parts import MismatchParts
from verl_qerl.verl_plugin.trainer.model_fields import with_tensors
from verl_qerl.verl_plugin.trainer.noise import Noise
from verl_qerl.verl_plugin.trainer.noise_effect import NoiseEffect
from verl_qerl.verl_plugin.trainer.noise_schedule import NoiseSchedule
from verl_qerl.verl_plugin.trainer.policy_loss import ActorLoss
from verl_qerl.verl_plugin.trainer.polling import Polling
from verl_qerl.verl_plugin.trainer.rescoring import keep_sample
from verl_qerl.verl_plugin.trainer.sync_check import SyncCheck

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # `install` puts it before each of verl's trainers

# In the order in which their hooks are called. A feature without a sentence may stand anywhere.
FEATURES: tuple[type[Feature], ...] = (
    EngineHealth,  # First: nobody else is to ask an engine that has ended, or look at what it left.
    Noise,  # Before SyncCheck, which measures how long a sync takes: setting the noise is not part of it.
    SyncCheck,  # Before NoiseEffect, which asks about norms: an engine that missed the sync is told as that.
    NoiseEffect,  # Before the next two: it leaves the noise of the step, with which they score.
    MismatchParts,  # Before Gate, which judges by the answers that were scored and names the parts in its error.
    Gate,
    NoiseSchedule,
    WholeCheckpoints,
    ActorLoss,
    Polling,
    CriticWithoutMark,
)


class FeaturedTrainer(_Trainer):
    """Overrides of verl's PPOTrainer; what they do is in the features.

    Attributes:
        run: What features see of the trainer.
    """

    FEATURES = FEATURES

    def __init__(self, config: DictConfig) -> None:
        self.run = prepare(self, config)
        found = (kind.from_config(self.run) for kind in self.FEATURES)
        self.features = [feature for feature in found if feature is not None]
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        keep_sample(buffer, self.run)
        self._tell("on_replay_buffer", buffer)
        return buffer

    def on_init_end(self) -> None:
        """Run the features around verl's hook, which syncs the weights for the first time."""
        self._tell("before_init_end")
        super().on_init_end()
        self._tell("after_init_end")

    def on_sample_end(self) -> None:
        """Run the features before verl's hook, which puts the rollout to sleep."""
        self._tell("before_sample_end")
        super().on_sample_end()

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        # In bypass mode no model reads it.
        batch = super()._compute_old_log_prob(batch if self.run.bypasses else with_tensors(batch), metrics)
        self._tell("after_old_log_prob", batch, tags, metrics)
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: dict) -> Any:
        return super()._compute_ref_log_prob(with_tensors(batch), metrics)

    def _compute_values(self, batch: Any, metrics: dict) -> Any:
        self._tell("before_values", batch)
        return super()._compute_values(with_tensors(batch), metrics)

    def _update_critic(self, batch: Any, metrics: dict) -> Any:
        return super()._update_critic(with_tensors(batch), metrics)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        return super()._update_actor(with_tensors(batch), metrics)

    def on_step_end(self) -> None:
        """Run the features around verl's hook, which syncs the weights."""
        self._tell("before_step_end")
        super().on_step_end()
        self._tell("after_step_end")

    def _consume_sync_metrics(self) -> dict:
        return {**super()._consume_sync_metrics(), **self.run.take_metrics()}

    def on_validate_begin(self) -> None:
        """Run the features before verl's hook."""
        self._tell("before_validate_begin")
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        """Run the features after verl's hook."""
        super().on_validate_end()
        self._tell("after_validate_end")

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        self._tell("before_save", folder)
        super()._save_checkpoint()
        self._tell("after_save", folder)

    def _load_checkpoint(self) -> None:
        self._tell("before_load")
        super()._load_checkpoint()
        self._tell("after_load")

    def _step_once(self, *args: Any, **kwargs: Any) -> Any:
        with self._errors_told():
            return super()._step_once(*args, **kwargs)

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        with self._errors_told():
            return super()._validate(*args, **kwargs)

    def _tell(self, hook: str, *args: Any) -> None:
        for feature in self.features:
            getattr(feature, hook)(*args)

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tell("on_error", error)
            raise


def prepare(trainer: Any, config: DictConfig) -> Run:
    """Write the options of a run into verl's nodes, where the driver has not done it, and read those of the features.

    Args:
        config: The whole configuration, changed in place before verl reads it.

    Raises:
        RuntimeError: vLLM is of another version.
        ValueError: An option is unknown, out of range, or does not fit the others.
    """
    apply.prepare(config)
    return Run(trainer, config, apply.aqn_options(config), gate_options(config))


def install(module: ModuleType) -> None:
    """Replace the trainers of verl's registry by subclasses; a second call does nothing."""
    registry = module.trainer_base.TRAINER_REGISTRY
    for mode, trainer in list(registry.items()):
        if not issubclass(trainer, FeaturedTrainer):
            registry[mode] = type(f"Qerl{trainer.__name__}", (FeaturedTrainer, trainer), {"__doc__": trainer.__doc__})
