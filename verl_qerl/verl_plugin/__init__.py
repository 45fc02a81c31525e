"""The training side. Importing this registers everything; verl does so through the entry point `verl.plugins`.

The import must stay light: it runs in a dozen processes while verl itself is half imported. What needs verl's engines,
trainers or rollouts waits for them in hooks. verl logs a plugin that fails at DEBUG only, so failures are kept in
FAILURE, and stop the program when its arguments ask for QeRL.
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
from verl_qerl.verl_plugin.warnings_kept import keep_warnings

logger = logging.getLogger(__name__)
SUPPORTED = {"verl": "==0.9.1", "ray": ">=2.54"}  # Ray tells the name of its session from then on
FAILURE: Exception | None = None
_ROLLOUTS = ("fp8", "int8", "mxfp4", "nvfp4")


def _register() -> None:
    keep_warnings()
    for package, accepted in SUPPORTED.items():
        found = importlib.metadata.version(package)
        problem = f"{package} is {found}. verl_qerl works with {package}{accepted}. Install that release."
        fits = SpecifierSet(accepted).contains(found, prereleases=True)
        if not fits and not upstream.goes_on_untested(problem, package, _replaced(package)):
            raise UpstreamDriftError(problem)
    OmegaConf.register_new_resolver("verl_qerl.has_adapter", bool, replace=True)  # of config/rollout/nvfp4.yaml
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_qerl.verl_plugin import cpu

        cpu.register()
    hooks.when_imported("verl.utils", "verl_qerl.verl_plugin.config.driver")
    hooks.when_imported("verl.trainer.ppo.core_algos", "verl_qerl.verl_plugin.trainer.policy_loss")
    hooks.when_imported("verl.workers.engine", "verl_qerl.verl_plugin.actor.engine")
    hooks.when_imported("verl.workers.rollout.replica", "verl_qerl.verl_plugin.rollout.server")
    hooks.when_imported("verl.trainer.ppo.v1", "verl_qerl.verl_plugin.trainer.trainer")
    from verl_qerl.verl_plugin.config import legacy  # which asks this module for `asks_for_qerl`

    for program in legacy.PROGRAMS:
        hooks.when_imported(program, legacy.__name__)


def _replaced(package: str) -> dict[str, set[str]]:
    """Functions of a host that shims replace -> the sources that they were written for."""
    from verl_qerl.verl_plugin.shims import SHIMS

    ours = (shim for shim in SHIMS if shim.target.startswith(f"{package}."))
    return {shim.target: {shim.fingerprint, shim.patched} for shim in ours}


def asks_for_qerl(arguments: list[str]) -> bool:
    """Whether a command line sets one of our nodes or options, or selects one of our rollouts or our policy loss."""
    pairs = [argument.lstrip("+").partition("=")[::2] for argument in arguments]
    values = {name: value.strip().strip("'\"") for name, value in pairs}  # Hydra takes quotes away too
    nodes = {name.partition(".")[0] for name in values}
    acr = values.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "acr"
    of_workers = any("additional_config" in argument and "verl_qerl" in argument for argument in arguments)
    return bool(nodes & {"aqn", "acr", "uaq", "qerl"}) or acr or of_workers or values.get("rollout") in _ROLLOUTS


try:
    _register()
except (UpstreamDriftError, ImportError, AttributeError) as error:
    FAILURE = error
    if asks_for_qerl(sys.argv):
        raise SystemExit(f"verl_qerl cannot be used: {error}") from error
    logger.error("verl_qerl is installed but not active: %s", error)
