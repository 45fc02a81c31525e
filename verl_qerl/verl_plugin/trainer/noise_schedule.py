"""The schedule of the noise beside a checkpoint: a resumed run goes on with its sigma, or says that it does not.

Sigma follows from the step, the options of `aqn` and M, the number of steps that the stages are spread over. A user
who changes an option means it, and is told once. M, however, changes when a run is extended or cut short, or when its
data do, and nobody spoke of noise: where that would move sigma the run is refused until `aqn.total_steps` says what is
meant. The file lies beside data.pt, which the trainer writes too, and is there before the tracker names the step.

With `aqn.target_kl` it also has the sigmas that were found so far, which nothing else would give again.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from verl_qerl.algos.aqn import AQNConfig, sigma_at_step, stage_of
from verl_qerl.checkpoints.record import read_whole, write_whole
from verl_qerl.verl_plugin.trainer.feature import Feature, Run

logger = logging.getLogger(__name__)

RECORD = "verl_qerl_aqn.json"
SEARCHED = "searched"  # key of the record, beside the options
_UNITS = ("target_kl", "mode", "targets", "draw")  # with others a sigma that was found causes another KL


class Saved(NamedTuple):
    """Options of a checkpoint's noise, `total_steps` set, and stage -> (first step, sigma) found for `target_kl`."""

    config: AQNConfig
    searched: dict[int, tuple[int, float]]


class NoiseSchedule(Feature):
    """Writes the schedule beside each checkpoint, and compares it with that of a checkpoint that is loaded.

    It is in runs without noise too, whose checkpoint may have been of a run with some.
    """

    def before_save(self, folder: Path) -> None:
        """Write the schedule."""
        run = self._run
        write_schedule(folder, run.aqn, run.total_steps, run.searched)

    def after_load(self) -> None:
        """Compare, and go on with the sigmas that were found."""
        run: Run = self._run
        trainer = run.config.trainer
        if run.step:
            folder = Path(trainer.default_local_dir) / f"global_step_{run.step}"
            if trainer.resume_mode == "resume_path":
                folder = Path(trainer.resume_from_path)
            run.searched = check_schedule(folder, run.step, run.aqn, run.total_steps)


def write_schedule(
    folder: Path, config: AQNConfig, total_steps: int, searched: Mapping[int, tuple[int, float]]
) -> None:
    """Write the options of the noise, with the M in force; without noise there is no file.

    Args:
        folder: global_step_N; made if need be.
        searched: Stage -> (first step, sigma) found for `target_kl`.
    """
    if not config.enabled:
        (folder / RECORD).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    pinned = replace(config, total_steps=config.total_steps or total_steps, targets=config.norms)
    write_whole(folder / RECORD, asdict(pinned) | ({SEARCHED: dict(searched)} if searched else {}))


def read_schedule(folder: Path) -> Saved | None:
    """The noise that a checkpoint was sampled with, None where it has none; raises as `read_whole`."""

    def make(content: Any) -> Saved:
        options = dict(content)
        searched = {int(at): (int(since), float(sigma)) for at, (since, sigma) in options.pop(SEARCHED, {}).items()}
        found = AQNConfig.from_mapping(options)
        if found.total_steps is None:
            raise ValueError("total_steps is missing")
        return Saved(found, searched)

    remedy = "Remove it to go on with the schedule of this run's options."
    return read_whole(folder / RECORD, make, "the schedule of the noise", remedy)


def check_schedule(folder: Path, step: int, config: AQNConfig, total_steps: int) -> dict[int, tuple[int, float]]:
    """Compare the schedule of a checkpoint with that of the run that resumes it; say once what an option changes.

    Args:
        step: The last training step that the checkpoint holds.

    Returns:
        Stage -> (first step, sigma) found for `target_kl` that this run goes on with.

    Raises:
        ValueError: Another number of steps moves sigma, and `aqn.total_steps` does not say that it shall.
        CheckpointFormatError: See `read_schedule`.
    """
    saved = read_schedule(folder)
    if saved is None:
        if config.enabled:
            logger.warning("%s has no %s: noise was off in it, or its schedule is not known.", folder, RECORD)
        return {}
    config = replace(config, targets=config.norms)  # as it was written
    _refuse_shift(folder, step, saved, config, total_steps)
    kept = all(getattr(config, name) == getattr(saved.config, name) for name in _UNITS)
    searched = _by_stage(saved, step, config, total_steps) if config.enabled and kept else {}
    _tell_changes(folder, step, saved, Saved(config, searched), total_steps)
    return searched


def _by_stage(saved: Saved, step: int, config: AQNConfig, total_steps: int) -> dict[int, tuple[int, float]]:
    """The sigmas that were found, by stages of this run.

    Where these lie otherwise the numbers are of other steps: the last sigma goes on, and later stages are searched for.
    """
    coming = range(step + 1, total_steps + 1)
    moved = any(stage_of(config, at, total_steps) != stage_of(saved.config, at, total_steps) for at in coming)
    if not moved or not saved.searched:
        return saved.searched
    _, latest = max(saved.searched.values())
    stage = stage_of(config, step + 1, total_steps)
    return {stage: (step + 1, latest)} if stage else {}


def _refuse_shift(folder: Path, step: int, saved: Saved, config: AQNConfig, total_steps: int) -> None:
    if not config.enabled or config.total_steps is not None:
        return
    length = saved.config.total_steps
    assert length is not None
    kept = replace(config, total_steps=length)
    searched = None
    if saved.searched:  # what later stages will find is about what the last one has
        _, latest = saved.searched[max(saved.searched)]
        searched = dict.fromkeys(range(config.num_stages), (1, latest)) | saved.searched
    for at in range(step + 1, total_steps + 1):
        before, now = (sigma_at_step(options, at, total_steps, searched) for options in (kept, config))
        if before != now:
            last = sigma_at_step(kept, length, total_steps, searched)
            raise ValueError(
                f"sigma would move with the number of steps: at step {at} it is {before:g} over the {length} steps of"
                f" the checkpoint, {now:g} over the {total_steps} steps of this run, in {folder}. Accepted is another"
                f" number of steps with aqn.total_steps. Set +aqn.total_steps={length} to keep the schedule"
                f" ({last:g} after its last step), or +aqn.total_steps={total_steps} to spread its stages anew."
            )


def _tell_changes(folder: Path, step: int, saved: Saved, run: Saved, total_steps: int) -> None:
    # Without aqn.total_steps the number of steps moves nothing: that was refused.
    now = replace(run.config, total_steps=run.config.total_steps or saved.config.total_steps)
    changes = [
        f"aqn.{field.name}={getattr(now, field.name)} (was {getattr(saved.config, field.name)})"
        for field in fields(AQNConfig)
        if getattr(now, field.name) != getattr(saved.config, field.name)
    ]
    if changes and step < total_steps:
        before = sigma_at_step(saved.config, step + 1, total_steps, saved.searched)
        after = sigma_at_step(now, step + 1, total_steps, run.searched)
        logger.warning(
            "the noise is not that of the checkpoint in %s: %s. Sigma of step %d is %g, and was to be %g.",
            *(folder, ", ".join(changes), step + 1, after, before),
        )
