"""Whether a run sets an option of ours; if not, it is a stock run and nothing of it is changed."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_qerl.options.rules import FSDP, LOSS_MODE, ROLLOUT, VLLM, tells_workers
from verl_qerl.vllm_plugin import NAMES

_NODES = ("aqn", "acr", "uaq", "qerl")
# Where apply.py writes, the second under `verl_qerl`; a run that sets them itself is refused.
_SET_BY_US, _TOLD = f"{FSDP}.qerl", f"{VLLM}.additional_config"
# Classes, loaders and an attention that a run may name without another option of ours.
_NAMES_OURS = (
    f"{VLLM}.worker_extension_cls",
    f"{VLLM}.scheduler_cls",
    f"{VLLM}.load_format",
    f"{VLLM}.quantization",
    f"{ROLLOUT}.load_format",
    f"{ROLLOUT}.quantization",
    f"{FSDP}._target_",
    "actor_rollout_ref.model.override_config.attn_implementation",
    "critic.model.override_config.attn_implementation",
)
# Modules, packages or beginnings of names: of programs that do not check the configuration on the driver.
_PROGRAMS = (
    "verl.experimental.one_step_off_policy",
    "verl.experimental.fully_async_policy",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation_server",
    "verl.trainer.sft_trainer",
)


def uses_qerl(config: DictConfig) -> bool:
    """Whether a run sets an option of ours. `+platform=cpu` is none: VERL_PLATFORM=cpu registers what belongs to it."""
    if any(OmegaConf.select(config, name) is not None for name in (*_NODES, _SET_BY_US)):
        return True
    if tells_workers(OmegaConf.select(config, _TOLD)):
        return True
    named = (str(OmegaConf.select(config, name)) for name in _NAMES_OURS)
    return OmegaConf.select(config, LOSS_MODE) == "acr" or any(name.startswith("verl_qerl") for name in named)


def names_a_format(config: DictConfig) -> bool:
    """Whether a node that neither verl nor we read names a format of ours, as `+rolout=nvfp4` leaves one."""
    nodes: Any = OmegaConf.to_container(config)  # unresolved: nothing of a stock run may fail here
    held = [node.get("format") if isinstance(node, dict) else node for node in nodes.values()]
    return any(form in held for form in NAMES.values())


def asks_for_qerl(arguments: list[str]) -> bool:
    """Whether a command line sets an option of ours, where there is no configuration to look at.

    Args:
        arguments: The arguments of Hydra; options in files are not seen.
    """
    pairs = [argument.lstrip("+").partition("=")[::2] for argument in arguments]
    values = {name: value.strip().strip("'\"") for name, value in pairs}  # Hydra takes quotes away too
    nodes = {name.partition(".")[0] for name in values}
    of_workers = any("additional_config" in argument and "verl_qerl" in argument for argument in arguments)
    ours = values.get(LOSS_MODE) == "acr" or values.get("rollout") in NAMES.values()
    return bool(nodes & {*_NODES}) or of_workers or ours


def refuse_other_programs(command: list[str]) -> None:
    """Stop a program of verl that would run without our options, by SystemExit, if its command line sets one."""
    started = " ".join(argument.replace("/", ".") for argument in command if "=" not in argument)
    name = next((name for name in _PROGRAMS if name in started), None)
    if name and asks_for_qerl(command):
        raise SystemExit(
            f"{name} has no AQN, no ACR, no UAQ, no NVFP4, no gate and no +qerl.rollout. Accepted is"
            " verl.trainer.main_ppo. Start that, or leave these options out."
        )
