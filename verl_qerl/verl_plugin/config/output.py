"""The folders of checkpoints, of which verl says what is wrong once its engines run, or at the first checkpoint."""

import os
from pathlib import Path

from omegaconf import DictConfig

from verl_qerl.verl_plugin.config.nodes import paths_are_here


def check_output(config: DictConfig) -> None:
    """Refuse with a ValueError, in a run here, what is no checkpoint to go on from, and a folder that cannot hold any.

    The folder is looked at where the run saves; null is refused too, and one that cannot be made or written to.
    """
    trainer = config.trainer
    if not paths_are_here(config):
        return
    if trainer.resume_mode == "resume_path":
        _check_resumed(trainer.resume_from_path)
    if trainer.save_freq is not None and trainer.save_freq <= 0:
        return
    for name, accepted in (("save_freq", "A number, -1 for no checkpoints,"), ("default_local_dir", "A directory")):
        if trainer[name] is None:
            raise ValueError(f"trainer.{name}=null ends verl's run. {accepted} is accepted. Set one.")
    folder = Path(trainer.default_local_dir).absolute()
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))  # a link to nothing is in the way
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"trainer.default_local_dir={trainer.default_local_dir} cannot hold checkpoints: this account cannot write"
            f" below {above}. A directory that it may write to is accepted. Set another."
        )


def _check_resumed(path: object) -> None:
    """As verl does when it loads it: a folder by the name of its step."""
    if not isinstance(path, str) or "global_step_" not in path or not Path(path).is_dir():
        raise ValueError(
            f"trainer.resume_from_path={path} is no checkpoint of a run. A folder DIR/global_step_N that verl has"
            " written is accepted. Check the path, or leave trainer.resume_mode=resume_path out."
        )
