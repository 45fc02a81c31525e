"""`additional_config.verl_qerl` of any run of verl: looked at on the driver, and read by workers that are ours."""

import logging
from types import SimpleNamespace

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_qerl import vllm_plugin
from verl_qerl.verl_plugin.config.nodes import plain
from verl_qerl.vllm_plugin.options import KEY, rollout_options

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "verl_qerl.verl_plugin.weight_sync.worker_extension.WorkerExtension"
_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def check_rollout(config: DictConfig) -> bool:
    """Whether a run sets options of the rollout, which are looked at.

    Args:
        config: Of the whole run.

    Raises:
        RuntimeError: vLLM is of another version.
        ValueError: An option is unknown or out of range.
    """
    options = plain(OmegaConf.select(config, f"{_VLLM}.additional_config.{KEY}"))
    if options is None:
        return False
    problem = vllm_plugin.version_problem()
    if problem:
        raise RuntimeError(problem)
    rollout_options(SimpleNamespace(additional_config={KEY: options}))
    return True


def use_rollout_options(config: DictConfig) -> None:
    """Name our worker extension, which alone reads the options, for a run that sets one.

    Args:
        config: Of the run, changed in place. A worker extension named by the user stays.

    Raises:
        RuntimeError: As `check_rollout`.
        ValueError: As there.
    """
    if not check_rollout(config):
        return
    with open_dict(config):
        named = config.actor_rollout_ref.rollout.engine_kwargs.vllm.setdefault("worker_extension_cls", WORKER_EXTENSION)
    if named != WORKER_EXTENSION:
        logger.warning(
            "verl_qerl: %s=%s reads additional_config.%s if it inherits from %s; else most of its options do nothing.",
            f"{_VLLM}.worker_extension_cls",
            named,
            KEY,
            WORKER_EXTENSION,
        )
