"""Checkpoints of verl's trainers that a crash cannot spoil, in runs whose base is packed.

verl writes a step in this order: the actor (our engine marks it as whole), data.pt, TransferQueue's state, and last
latest_checkpointed_iteration.txt, which `resume_mode=auto` follows. So a step that was cut short is not followed. Left
to us are: a step that the user names, the tracker itself, which is emptied before it is written, and
`max_actor_ckpt_to_keep=1`, which deletes the last actor before the tracker names the next.
"""

import logging
import os
import re
import shutil
import zipfile
from pathlib import Path

from omegaconf import DictConfig

from verl_qerl.checkpoints.record import TRACKER, partial_of
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.trainer.feature import Feature

logger = logging.getLogger(__name__)

_DATA = "data.pt"
_QUEUE = "transfer_queue"
_NO_QUEUE_YET = "verl_qerl_transfer_queue_to_come"  # while a step is saved that will have one


class WholeCheckpoints(Feature):
    """Removes what a killed run left in a step's folder, and checks a step before it is loaded."""

    def before_save(self, folder: Path) -> None:
        """Remove records of a run that was killed in this step, which would pass for the new ones."""
        (folder / _DATA).unlink(missing_ok=True)
        (folder / _NO_QUEUE_YET).unlink(missing_ok=True)
        if (folder / _QUEUE).exists():
            shutil.rmtree(folder / _QUEUE)
        if self._run.config.trainer.v1.trainer_mode != "sync":  # which has none
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _NO_QUEUE_YET).touch()

    def after_save(self, folder: Path) -> None:
        """The queue is there too."""
        (folder / _NO_QUEUE_YET).unlink(missing_ok=True)

    def before_load(self) -> None:
        """See `check_resumed`."""
        check_resumed(self._run.config.trainer)


def check_resumed(trainer: DictConfig) -> Path | None:
    """Require that the step which verl will load is whole, by the options of its trainer; see `check_tracker`.

    Returns:
        Its folder global_step_N; None where a run starts anew.
    """
    if trainer.resume_mode == "auto" and trainer.default_local_dir:
        return check_tracker(Path(trainer.default_local_dir))
    if trainer.resume_mode == "resume_path":
        # verl takes what follows the last "global_step_", a slash too, for the number.
        if not re.fullmatch(r".*global_step_\d+", str(trainer.resume_from_path)):
            raise CheckpointFormatError(
                f"trainer.resume_from_path={trainer.resume_from_path} names no step. A folder global_step_N is"
                " accepted, with nothing behind it. Set it to one; trainer.resume_mode=auto takes the last one of"
                " trainer.default_local_dir."
            )
        return check_step(Path(trainer.resume_from_path))
    return None


def check_tracker(run: Path) -> Path | None:
    """Require that the tracker of a run names a whole step; an empty one is written again.

    A process that is killed between emptying and writing it has written everything else of its step, which is the
    newest one that is whole.

    Args:
        run: trainer.default_local_dir; without a tracker there is nothing to resume.

    Returns:
        The folder of the step, or None.

    Raises:
        CheckpointFormatError: The tracker is damaged, or names a step that is not there or half-written.
    """
    tracker = run / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not text:
        text = str(_newest_step(run))
        logger.warning("%s was empty; the newest whole step is %s", tracker, text)
        partial = partial_of(tracker)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, tracker)
    if not text.isdecimal():
        raise CheckpointFormatError(
            f"the tracker names no step: {tracker} holds {text[:40]!r}. A number is accepted. Write that of a "
            "global_step_N beside it."
        )
    return check_step(run / f"global_step_{text}")


def check_step(folder: Path) -> Path:
    """Refuse with a CheckpointFormatError a step that is not there or half-written, and return `folder`.

    The engine checks its own part.

    A step of `sync` has no state of TransferQueue, and any mode can resume it.
    """
    if not folder.is_dir():
        raise CheckpointFormatError(
            f"the step to resume from is not there: {folder}. A folder global_step_N is accepted. Set "
            f"trainer.resume_from_path to one, or correct {TRACKER}; trainer.resume_mode=disable starts anew."
        )
    missing = None
    if not zipfile.is_zipfile(folder / _DATA):  # of torch.save; its table of contents is written last
        missing = _DATA
    elif (folder / _NO_QUEUE_YET).exists() and not (folder / _QUEUE).is_dir():
        missing = _QUEUE
    if missing:
        raise CheckpointFormatError(
            f"the checkpoint is half-written: {folder} has no whole {missing}. It is written after the actor. "
            "Resume from an earlier step."
        )
    if not (folder / "actor").is_dir():
        raise CheckpointFormatError(
            f"the step to resume from has no actor: {folder / 'actor'}. trainer.max_actor_ckpt_to_keep removes those of"
            " all but the last steps. A step that has its own is accepted. Resume from a later one."
        )
    return folder


def _newest_step(run: Path) -> int:
    steps = [int(found[1]) for path in run.iterdir() if (found := re.fullmatch(r"global_step_(\d+)", path.name))]
    for step in sorted(steps, reverse=True):
        if zipfile.is_zipfile(run / f"global_step_{step}" / _DATA):
            return step
    raise CheckpointFormatError(
        f"the tracker is empty and no step is whole: {run / TRACKER}. A number is accepted. Remove it to start anew."
    )
