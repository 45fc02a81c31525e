"""The schedule of the noise beside a checkpoint: a resumed run goes on with its sigma, or says that it does not.

Sigma follows from the step, the options of `aqn` and M, the number of steps that the stages are spread over. A user
who changes an option means it, and is told once. M, however, changes when a run is extended or cut short, or when its
data do, and nobody spoke of noise: where that would move sigma the run is refused until `aqn.total_steps` says what is
meant. The file lies beside data.pt, which the trainer writes too, and is there before the tracker names the step.
"""

import logging
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_qerl.algos.aqn import AQNConfig, sigma_at_step
from verl_qerl.nvfp4.record import read_whole, write_whole

if TYPE_CHECKING:
    from verl_qerl.verl_plugin.trainer import NoiseMixin as _Noise
else:
    _Noise = object  # stands before it in the trainers

logger = logging.getLogger(__name__)

RECORD = "verl_qerl_aqn.json"


class NoiseScheduleMixin(_Noise):
    """Hooks of verl's PPOTrainer around saving and loading; writes nothing unless `aqn.enabled`."""

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        write_schedule(folder, self._aqn, self.total_training_steps)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            trainer = self.config.trainer
            folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
            if trainer.resume_mode == "resume_path":
                folder = Path(trainer.resume_from_path)
            check_schedule(folder, self.global_steps, self._aqn, self.total_training_steps)


def write_schedule(folder: Path, config: AQNConfig, total_steps: int) -> None:
    """Write the options of the noise, with the M in force; without noise there is no file.

    Args:
        folder: global_step_N; made if need be.
        config: Of the run.
        total_steps: Of the run.
    """
    if not config.enabled:
        (folder / RECORD).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    pinned = replace(config, total_steps=config.total_steps or total_steps)
    write_whole(folder / RECORD, asdict(pinned))


def read_schedule(folder: Path) -> AQNConfig | None:
    """The options that a checkpoint was sampled with, `total_steps` set; None where it has none.

    Raises:
        CheckpointFormatError: The file is damaged or of another version.
    """

    def make(content: Any) -> AQNConfig:
        found = AQNConfig.from_mapping(content)
        if found.total_steps is None:
            raise ValueError("total_steps is missing")
        return found

    remedy = "Remove it to go on with the schedule of this run's options."
    return read_whole(folder / RECORD, make, "the schedule of the noise", remedy)


def check_schedule(folder: Path, step: int, config: AQNConfig, total_steps: int) -> None:
    """Compare the schedule of a checkpoint with that of the run that resumes it; say once what an option changes.

    Args:
        folder: global_step_N.
        step: N; the first step to come is the next.
        config: Options of this run.
        total_steps: Of this run.

    Raises:
        ValueError: Another number of steps moves sigma, and `aqn.total_steps` does not say that it shall.
        CheckpointFormatError: As `read_schedule`.
    """
    saved = read_schedule(folder)
    if saved is not None:
        _refuse_shift(folder, step, saved, config, total_steps)
        _tell_changes(folder, step, saved, config, total_steps)
    elif config.enabled:
        logger.warning("%s has no %s: noise was off in it, or its schedule is not known.", folder, RECORD)


def _refuse_shift(folder: Path, step: int, saved: AQNConfig, config: AQNConfig, total_steps: int) -> None:
    if not config.enabled or config.total_steps is not None:
        return
    kept = replace(config, total_steps=saved.total_steps)
    for at in range(step + 1, total_steps + 1):
        before, now = (sigma_at_step(options, at, total_steps) for options in (kept, config))
        if before != now:
            raise ValueError(
                f"sigma would move with the number of steps: at step {at} it is {before:g} over the"
                f" {saved.total_steps} steps of the checkpoint, {now:g} over total_training_steps={total_steps} of this"
                f" run, in {folder}. Accepted is another number of steps with aqn.total_steps. Set"
                f" +aqn.total_steps={saved.total_steps} to keep the schedule (sigma_end after its last step), or"
                f" +aqn.total_steps={total_steps} to spread its stages anew."
            )


def _tell_changes(folder: Path, step: int, saved: AQNConfig, config: AQNConfig, total_steps: int) -> None:
    # Without aqn.total_steps the number of steps moves nothing: that was refused.
    now = replace(config, total_steps=config.total_steps or saved.total_steps)
    changes = [
        f"aqn.{field.name}={getattr(now, field.name)} (was {getattr(saved, field.name)})"
        for field in fields(AQNConfig)
        if getattr(now, field.name) != getattr(saved, field.name)
    ]
    if changes and step < total_steps:
        before, after = (sigma_at_step(options, step + 1, total_steps) for options in (saved, now))
        logger.warning(
            "the noise is not that of the checkpoint in %s: %s. Sigma of step %d is %g, and was to be %g.",
            folder,
            ", ".join(changes),
            step + 1,
            after,
            before,
        )
