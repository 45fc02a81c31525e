"""Where a run writes, of which verl says what is wrong once its engines run, or at the first checkpoint."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_qerl.verl_plugin.config.nodes import paths_are_here, plain

# Of verl's loggers, those with a package of another name.
_PACKAGES = {"vemlp_wandb": "volcengine_ml_platform"}
_OF_VERL = ("console", "file", "tracking", "rl_insight")


def check_output(config: DictConfig) -> None:
    """Refuse with a ValueError, in a run here, what it cannot write to.

    That is a logger that is not installed and, where the run saves, a folder that is null or cannot be made or written
    to.
    """
    trainer = config.trainer
    if not paths_are_here(config):
        return
    _check_loggers(trainer.logger)
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


def _check_loggers(given: Any) -> None:
    named = plain(given)
    for name in [named] if isinstance(named, str) else named or ():
        package = _PACKAGES.get(name, name)
        if name not in _OF_VERL and find_spec(package) is None:
            raise ValueError(
                f"trainer.logger={named} needs the package {package}, which is not installed. Loggers with their"
                f" package, console and file are accepted. Install it, or leave {name} out."
            )
