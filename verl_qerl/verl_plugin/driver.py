"""The driver decides whether anything of ours takes part in a run, from the configuration that Hydra composed.

Wherever this package is installed, one function of verl is wrapped: `validate_config`, which the driver calls with the
whole configuration before it starts Ray. Where the run sets no option of ours the wrapper calls verl's function, and
every other function, class and registry entry is verl's own, in all processes.

Where it sets one, our side is registered on the driver, and VERL_QERL_ACTIVE=1 is added to the `runtime_env` that verl
hands to `ray.init`. Each process of the run that imports verl finds the variable and registers our side there. Ray
keeps a runtime environment for each job: it reaches the workers of every node, also on a cluster that was there before,
and no other run on that cluster. Options may come from a file of the user's, which the command line does not show.

Checks are imported when a run needs them: this module is imported in every process, while verl is half imported.
"""

import dataclasses
import logging
import os
from types import ModuleType

from omegaconf import DictConfig, OmegaConf

from verl_qerl import upstream, verl_plugin
from verl_qerl.errors import UpstreamDriftError
from verl_qerl.verl_plugin.config.nodes import mapping, run_of
from verl_qerl.verl_plugin.config.uses_qerl import names_a_format, uses_qerl
from verl_qerl.verl_plugin.shims import CONFIG_CHECK

logger = logging.getLogger(__name__)

# patches/verl/0007 has verl ask a policy loss, and nothing that this module does.
_ON_PATCHED = dataclasses.replace(CONFIG_CHECK, fingerprint=CONFIG_CHECK.patched, patched="")
_ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
_verl_starts_ray = False  # a check found none. One that the program started itself is left alone: it may need it


def install(module: ModuleType) -> None:
    """Wrap verl's `validate_config`; a verl whose own is another one is left alone, with a warning."""
    checks = CONFIG_CHECK, _ON_PATCHED
    if verl_plugin.FAILURE is not None:  # of whatever version, to refuse runs of ours
        checks = tuple(dataclasses.replace(check, versions="") for check in checks)
    try:
        if not upstream.install(checks[0]):
            upstream.install(checks[1])
    except UpstreamDriftError as error:
        if verl_plugin.FAILURE is not None:  # which has been told
            return
        logger.warning(
            "verl_qerl takes part in no run that does not have %s=1 in the environment of all its processes: %s",
            verl_plugin.ACTIVE,
            error,
        )


def look_at(config: DictConfig, use_critic: bool) -> None:
    """Register our side of a run that sets an option of ours, and check it; leave another run alone.

    Of a stock run whose only option of ours is misspelled, as `+rolout=nvfp4`, a warning says so.

    Args:
        config: The whole configuration; the environment of its Ray workers is changed in place.

    Raises:
        RuntimeError: The workers would know nothing of it, or a host is of another version.
        ValueError: An option is refused.
    """
    ours = uses_qerl(config)
    if verl_plugin.FAILURE is not None:
        if ours:
            raise RuntimeError(f"verl_qerl cannot be used, and this run has options of it: {verl_plugin.FAILURE}")
        return
    _end_ray_of_another_kind(ours)
    if ours:
        verl_plugin.activate()
        tell_workers(config)
        check_run(config, use_critic)
    else:
        if OmegaConf.select(config, "trainer.device") == "cpu":  # as +platform=cpu sets it; stock verl does not know it
            from verl_qerl.verl_plugin.config.apply import prepare

            prepare(config)
        if names_a_format(config):
            from verl_qerl.verl_plugin.config.spelling import check_spelling

            check_spelling(config)


def tell_workers(config: DictConfig) -> None:
    """Put `VERL_QERL_ACTIVE=1` into the environment that `config` has for the Ray workers which verl is about to start.

    Raises:
        RuntimeError: Ray runs already in this process, and its workers have no such variable.
    """
    import ray

    name = verl_plugin.ACTIVE
    if not ray.is_initialized():
        OmegaConf.update(config, _ENV_VARS, {**mapping(run_of(config), _ENV_VARS), name: "1"}, force_add=True)
    elif os.environ.get(name) != "1" and not _ray_is_told():
        raise RuntimeError(
            f"this run sets options of verl_qerl, and Ray runs already: its workers would train without them. Accepted"
            f" is verl.trainer.main_ppo, which starts Ray after this check, or a Ray that was started with {name}=1."
            f' Start the former, or call ray.init(runtime_env={{"env_vars": {{"{name}": "1"}}}}).'
        )


def _end_ray_of_another_kind(ours: bool) -> None:
    """End the Ray that an earlier job of a Hydra sweep left: verl would take it for this job too, told or not."""
    global _verl_starts_ray
    import ray
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not ray.is_initialized():
        _verl_starts_ray = True
        return
    sweeps = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if sweeps and _verl_starts_ray and os.environ.get(verl_plugin.ACTIVE) != "1" and _ray_is_told() != ours:
        ray.shutdown()  # verl starts another


def _ray_is_told() -> bool:
    """Whether the workers of the Ray that runs in this process register our side."""
    import ray

    return verl_plugin.ACTIVE in (ray.get_runtime_context().runtime_env.get("env_vars") or {})


def check_run(config: DictConfig, use_critic: bool) -> None:
    """Check every option of ours and write what it means into verl's nodes of `config` (config/apply.py).

    Raises:
        RuntimeError: A host is of another version.
        ValueError: An option is refused.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from verl_qerl.verl_plugin.actor.model_check import check_models
    from verl_qerl.verl_plugin.config.adapter_check import check_adapter
    from verl_qerl.verl_plugin.config.apply import prepare
    from verl_qerl.verl_plugin.config.nodes import paths_are_here
    from verl_qerl.verl_plugin.config.output import check_output
    from verl_qerl.verl_plugin.config.questions import check_files
    from verl_qerl.verl_plugin.config.shared_memory import check_copies

    prepare(config)
    policy_loss = POLICY_LOSS_REGISTRY.get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    check_config = getattr(policy_loss, "check_config", None)
    if check_config is not None:
        check_config(config)
    check_output(config)
    if OmegaConf.select(config, "qerl.base.format") is not None and paths_are_here(config):
        _check_resumed(config)
    check_files(config)
    check_models(config, use_critic)
    check_adapter(config)
    check_copies(config)


def _check_resumed(config: DictConfig) -> None:
    """Require of the step that will be loaded what trainer and engine require later, where options tell it."""
    from verl_qerl.options.rules import FSDP
    from verl_qerl.verl_plugin.actor.resume import check_options, refuse_adapter
    from verl_qerl.verl_plugin.actor.uaq_engine import check_scale
    from verl_qerl.verl_plugin.trainer.checkpoints import check_resumed

    step, model = check_resumed(config.trainer), config.actor_rollout_ref.model
    if step is None:
        return
    check_scale(step / "actor", OmegaConf.select(config, f"{FSDP}.uaq_scale"))
    if not model.lora_rank:
        refuse_adapter(step / "actor")
        return
    # An adapter from a file has its own.
    adapter = {} if model.get("lora_adapter_path") else {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
    check_options(step / "actor", config.qerl.base.format, adapter)
