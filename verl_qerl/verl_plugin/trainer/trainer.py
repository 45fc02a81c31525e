"""verl's trainers with features: one subclass of each overrides a method once and calls the features in one order."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl_qerl.options import rules
from verl_qerl.verl_plugin.config import apply
from verl_qerl.verl_plugin.config.questions import check_count
from verl_qerl.verl_plugin.trainer.checkpoints import WholeCheckpoints
from verl_qerl.verl_plugin.trainer.engine_health import EngineHealth
from verl_qerl.verl_plugin.trainer.feature import Feature, Run
from verl_qerl.verl_plugin.trainer.mismatch import Gate, can_compare, gate_options
from verl_qerl.verl_plugin.trainer.mismatch_parts import MismatchParts
from verl_qerl.verl_plugin.trainer.model_fields import with_tensors
from verl_qerl.verl_plugin.trainer.noise import Noise
from verl_qerl.verl_plugin.trainer.noise_effect import NoiseEffect
from verl_qerl.verl_plugin.trainer.noise_schedule import NoiseSchedule
from verl_qerl.verl_plugin.trainer.policy_loss import ActorLoss
from verl_qerl.verl_plugin.trainer.polling import poll_often
from verl_qerl.verl_plugin.trainer.rescoring import keep_sample
from verl_qerl.verl_plugin.trainer.sync_check import SyncCheck

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # `install` puts it before each of verl's trainers


def _can_ask_workers(run: Run) -> bool:
    # Disaggregated, the servers are verl's own, which drop the answers.
    ours = run.option(f"{rules.VLLM}.worker_extension_cls") == apply.WORKER_EXTENSION
    return ours and not run.option(f"{rules.ROLLOUT}.disaggregation.enabled") and run.syncs_each_step


# Feature -> the runs that have it, in the order in which hooks are called. One without a sentence may stand anywhere.
FEATURES: dict[type[Feature], Callable[[Run], Any]] = {
    # First: nobody else is to ask an engine that has ended, or look at what it left.
    EngineHealth: lambda run: run.gate,
    # Before SyncCheck, which measures how long a sync takes: setting the noise is not part of it.
    Noise: lambda run: run.aqn.enabled,
    # Before NoiseEffect, which asks about norms: an engine that missed the sync is told as that.
    SyncCheck: lambda run: run.requantizes or _can_ask_workers(run),
    # Before the next two: it leaves the noise of the step, with which they score.
    NoiseEffect: lambda run: run.aqn.enabled,
    # Before Gate, which judges by the answers that were scored and names the parts in its error.
    MismatchParts: lambda run: run.gate and run.gate.mismatch_sample,
    Gate: lambda run: run.gate and can_compare(run),
    NoiseSchedule: lambda run: True,
    WholeCheckpoints: lambda run: rules.QUANTIZED.beside(run.option),
    ActorLoss: lambda run: rules.ACR.beside(run.option),
}


class FeaturedTrainer(_Trainer):
    """Overrides of verl's PPOTrainer; what they do is in the features."""

    FEATURES = FEATURES

    def __init__(self, config: DictConfig) -> None:
        apply.prepare(config)  # where the driver has not done it
        self.run = Run(self, config, gate_options(config))
        self.features = [kind(self.run) for kind, needed in self.FEATURES.items() if needed(self.run)]
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        keep_sample(buffer, self.run)
        # `separate_async` takes a wait that is longer than one interval for a sign that the rollout is too slow.
        if self.run.gate and self.run.syncs_each_step:
            poll_often(buffer)
        return buffer

    def _init_dataloader(self) -> None:
        try:
            super()._init_dataloader()
        finally:
            left = vars(self).get("train_dataset")  # without longer ones; torch's sampler fails where it is empty
            if left is not None:
                which = f" of up to data.max_prompt_length={self.config.data.max_prompt_length} tokens"
                check_count(self.config, len(left), which)

    def on_init_end(self) -> None:
        """Run the features around verl's hook, which syncs the weights for the first time."""
        with self._errors_told():
            self._tell("before_init_end")
            super().on_init_end()
            self._tell("after_init_end")

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train as verl does; features may name the cause of an error."""
        with self._errors_told():
            super().fit(*args, **kwargs)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        self._tell("before_refill")
        return super()._add_prompts_to_generate(num_prompts)

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
        # What verl 0.9.1 leaves of the reference's pass: the critic would go without an adapter, and has none.
        batch.extra_info.pop("no_lora_adapter", None)
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
        metrics = {**super()._consume_sync_metrics(), **self.run.metrics}
        self.run.metrics.clear()
        return metrics

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


def install(module: ModuleType) -> None:
    """Replace the trainers of verl's registry by subclasses; a second call does nothing."""
    registry = module.trainer_base.TRAINER_REGISTRY
    for mode, trainer in list(registry.items()):
        if not issubclass(trainer, FeaturedTrainer):
            registry[mode] = type(f"Qerl{trainer.__name__}", (FeaturedTrainer, trainer), {"__doc__": trainer.__doc__})
