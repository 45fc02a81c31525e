"""The training side. Importing this registers everything; verl does so through the entry point `verl.plugins`.

The import must stay light: it runs in a dozen processes while verl itself is half imported. What needs verl's engines,
trainers or rollouts waits for them in hooks. verl logs a plugin that fails at DEBUG only, so failures are kept in
FAILURE, and stop the program when its arguments ask for QeRL.
"""

import importlib.metadata
import logging
import os
import sys

from verl_qerl.errors import UpstreamDriftError
from verl_qerl.verl_plugin import hooks

logger = logging.getLogger(__name__)

SUPPORTED = "0.9.1"
FAILURE: Exception | None = None


def _register() -> None:
    found = importlib.metadata.version("verl")
    if found != SUPPORTED:
        raise UpstreamDriftError(f"verl is {found}. verl_qerl works with verl=={SUPPORTED}. Install that release.")
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_qerl.verl_plugin import cpu

        cpu.register()
    hooks.when_imported("verl.workers.engine", "verl_qerl.verl_plugin.engine")
    hooks.when_imported("verl.workers.rollout.replica", "verl_qerl.verl_plugin.rollout")
    hooks.when_imported("verl.trainer.ppo.v1", "verl_qerl.verl_plugin.trainer")
    hooks.when_imported("verl.trainer.main_ppo_v0", "verl_qerl.verl_plugin.legacy")


def asks_for_qerl(arguments: list[str]) -> bool:
    """Whether a command line sets `aqn.*` or selects one of our rollouts."""
    keys = [argument.lstrip("+").partition("=")[0] for argument in arguments]
    return any(key == "aqn" or key.startswith("aqn.") for key in keys) or "+rollout=nvfp4" in arguments


try:
    _register()
except (UpstreamDriftError, ImportError, AttributeError) as error:
    FAILURE = error
    if asks_for_qerl(sys.argv):
        raise SystemExit(f"verl_qerl cannot be used: {error}") from error
    logger.error("verl_qerl is installed but not active: %s", error)
