"""The folder of checkpoints, which verl makes when it has trained as far as the first of them."""

import os
from pathlib import Path

from omegaconf import DictConfig

from verl_qerl.verl_plugin.config.nodes import paths_are_here


def check_output(config: DictConfig) -> None:
    """Refuse null and a folder that cannot be made or written to, with a ValueError, in a run here that saves."""
    trainer = config.trainer
    if not paths_are_here(config) or (trainer.save_freq is not None and trainer.save_freq <= 0):
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
