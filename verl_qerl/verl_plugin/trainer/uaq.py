"""UAQ in a run of verl: `+uaq.enabled=true` for an actor that trains its own weights.

The trainer hands the scale to the actor's engine, which scales what it loads from model.path (`uaq_engine`). A full
weight sync brings the scaled weights to the rollout before it samples or validates for the first time; until then it
holds those of model.path, which compute the same. The reference policy is not scaled. Checkpoints hold scaled weights;
`python -m verl_qerl export` undoes the scaling.
"""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_qerl.algos.uaq import UAQConfig, is_power_of_two
from verl_qerl.verl_plugin.config.nodes import plain

NODE = "uaq"
_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_STOCK_CONFIG = "verl.workers.config.FSDPEngineConfig"
_OUR_CONFIG = "verl_qerl.verl_plugin.config.base_options.ScaledFSDPEngineConfig"
_PACKED_CONFIG = "verl_qerl.verl_plugin.config.base_options.QerlFSDPEngineConfig"  # has the scale as well
_FLOAT32 = ("fp32", "float32", "32", None)  # None: verl trains in float32
_NO_EFFECT = "UAQ acts on weights that are trained and quantized again, and the base of an adapter is neither."

# Option, its default, whether its value is accepted, what is, and what to do.
_Rule = tuple[str, Any, Callable[[Any], bool], str, str]
_RULES: tuple[_Rule, ...] = (
    (f"{_MODEL}.lora_rank", 0, lambda v: not v, "0", f"{_NO_EFFECT} Leave out one of the two."),
    (f"{_MODEL}.lora.rank", 0, lambda v: not v, "0", f"{_NO_EFFECT} Leave out one of the two."),
    (f"{_MODEL}.lora_adapter_path", None, lambda v: v is None, "null", f"{_NO_EFFECT} Leave out one of the two."),
    (
        f"{_ACTOR}.fsdp_config._target_",
        _STOCK_CONFIG,
        lambda v: v in (_STOCK_CONFIG, _OUR_CONFIG, _PACKED_CONFIG),
        f"{_STOCK_CONFIG} or ours",
        "Another one has no place for the scale. Leave out one of the two.",
    ),
    (
        f"{_ACTOR}.strategy",
        "fsdp",
        lambda v: v in ("fsdp", "fsdp2"),
        "fsdp or fsdp2",
        "Other engines know no UAQ. Leave it out, or change the strategy.",
    ),
    (
        f"{_ACTOR}.checkpoint.save_contents",
        (),
        lambda v: "hf_model" not in v,
        "a list without hf_model",
        "verl would write scaled weights as the model. Leave it out and use `python -m verl_qerl export`.",
    ),
    (f"{_MODEL}.use_liger", False, lambda v: not v, "False", "Its norms cannot be checked on the CPU. Leave it out."),
    ("trainer.use_v1", True, bool, "True", "verl's first trainer knows no UAQ. Leave the option out."),
)


def uaq_options(config: DictConfig) -> UAQConfig:
    """Options of a run; without a node they are off.

    Args:
        config: Of the whole run.

    Raises:
        ValueError: An option is unknown or out of range, or UAQ has no effect, or not the stated one, in this run.
    """
    found = UAQConfig.from_mapping(plain(OmegaConf.select(config, NODE)))
    if not found.enabled:
        return found
    for name, default, accepts, accepted, remedy in _RULES:
        value = plain(OmegaConf.select(config, name, default=default))
        if not accepts(value):
            raise ValueError(
                f"{name}={value} does not go together with +uaq.enabled=true. Accepted is {accepted}. {remedy}"
            )
    dtype = OmegaConf.select(config, f"{_ACTOR}.fsdp_config.model_dtype")
    if dtype not in _FLOAT32 and not is_power_of_two(found.scale):
        raise ValueError(
            f"uaq.scale={found.scale:g} cannot be undone in weights of {dtype}. Accepted are powers of two, and any"
            f" scale in float32. Set {_ACTOR}.fsdp_config.model_dtype=fp32, or +uaq.scale=2."
        )
    return found


def use_uaq(config: DictConfig) -> None:
    """Hand the scale of a run to those who scale by it; without UAQ nothing is done.

    Args:
        config: Of the whole run, changed in place.

    Raises:
        ValueError: As `uaq_options`.
    """
    uaq = uaq_options(config)
    if uaq.enabled:
        tell_workers_the_scale(config, uaq.scale)


def tell_workers_the_scale(config: DictConfig, scale: float) -> None:
    """Hand it to the actor's engine, and to the rollout's workers, whose noise must grow as much as the norms.

    Args:
        config: Of the run, changed in place.
        scale: s.
    """
    with open_dict(config):
        node = config.actor_rollout_ref.actor.fsdp_config
        if node.get("_target_", _STOCK_CONFIG) == _STOCK_CONFIG:
            node["_target_"] = _OUR_CONFIG
        node["uaq_scale"] = scale
        if OmegaConf.select(config, "aqn.enabled", default=False):
            where = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.verl_qerl.uaq_scale"
            OmegaConf.update(config, where, scale)
