"""The training side. verl imports this through the entry point `verl.plugins`, in every process.

Nothing of ours takes part in a run unless the run sets an option of ours: driver.py decides, and tells the other
processes by an environment variable. The import must stay light: it runs in a dozen processes while verl itself is half
imported. What needs verl's engines, trainers or rollouts waits for them in hooks. verl logs a plugin that fails at
DEBUG only, so failures are kept in FAILURE, and stop the program when its arguments ask for QeRL.
"""

import importlib.metadata
import logging
import os
import sys

from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet

from verl_qerl import upstream
from verl_qerl.errors import UpstreamDriftError
from verl_qerl.verl_plugin import hooks
from verl_qerl.verl_plugin.config.uses_qerl import asks_for_qerl, refuse_other_programs
from verl_qerl.verl_plugin.warnings_kept import keep_warnings

logger = logging.getLogger(__name__)
SUPPORTED = {"verl": "==0.9.1", "ray": ">=2.54"}  # Ray tells the name of its session from then on
FAILURE: Exception | None = None
ACTIVE = "VERL_QERL_ACTIVE"  # 1 in the environment of all processes of a run that sets an option of ours


def _register() -> None:
    keep_warnings()
    for package, accepted in SUPPORTED.items():
        found = importlib.metadata.version(package)
        problem = f"{package} is {found}. verl_qerl works with {package}{accepted}. Install that release."
        fits = SpecifierSet(accepted).contains(found, prereleases=True)
        if not fits and not upstream.goes_on_untested(problem, package, _changes()):
            raise UpstreamDriftError(problem)
    OmegaConf.register_new_resolver("verl_qerl.has_adapter", bool, replace=True)  # of config/rollout/nvfp4.yaml
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_qerl.verl_plugin import cpu

        cpu.register()
    if os.environ.get(ACTIVE) == "1":
        activate()
    hooks.when_imported("verl.utils", "verl_qerl.verl_plugin.driver")
    refuse_other_programs(sys.orig_argv)  # in sys.argv a module has no name yet


def activate() -> None:
    """Register our side in this process: policy loss, engine, rollout and trainers; a second call does nothing."""
    hooks.when_imported("verl.trainer.ppo.core_algos", "verl_qerl.verl_plugin.trainer.policy_loss")
    hooks.when_imported("verl.workers.engine", "verl_qerl.verl_plugin.actor.engine")
    hooks.when_imported("verl.workers.rollout.replica", "verl_qerl.verl_plugin.rollout.server")
    hooks.when_imported("verl.trainer.ppo.v1", "verl_qerl.verl_plugin.trainer.trainer")


def _changes() -> tuple[upstream.HostChange | upstream.Shim, ...]:
    """What we change in verl, or repeat of its source."""
    from verl_qerl.verl_plugin import hosts, shims

    return *shims.SHIMS, *hosts.CHANGES


try:
    _register()
except (UpstreamDriftError, ImportError, AttributeError) as error:
    FAILURE = error
    if asks_for_qerl(sys.argv):
        raise SystemExit(f"verl_qerl cannot be used: {error}") from error
    logger.error("verl_qerl is installed but not active: %s", error)
    if isinstance(error, UpstreamDriftError):  # otherwise what the driver needs may be what failed
        hooks.when_imported("verl.utils", "verl_qerl.verl_plugin.driver")
