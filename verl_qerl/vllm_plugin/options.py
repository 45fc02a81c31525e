"""Options of an engine: `additional_config.verl_qerl`, vLLM's door for options of a plugin.

Under verl they are `+qerl.rollout.*`, with what the trainer tells its workers beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.options.schema import SWITCH, Rollout, option

KEY = "verl_qerl"
V2_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"  # of the environment; ours is made for V1, and vLLM chooses V2 for some models
STOCK_LINEAR = f"qerl.rollout.linear=stock (in vLLM additional_config.{KEY}.linear)"  # for messages
SCHEDULER = "verl_qerl.vllm_plugin.noise.scheduler.scheduler"  # for vLLM's scheduler_cls


@dataclass(frozen=True)
class RolloutOptions(Rollout):
    """What our side of vLLM does.

    Attributes:
        uaq_scale: s of UAQ, by which the actor's norms are larger than those that the noise is meant for.
        train_norms: The actor trains the two norms of each layer, and syncs bring them with the adapter.
    """

    NODE: ClassVar[str] = f"additional_config.{KEY}"

    aqn: AQNConfig = field(default_factory=AQNConfig)
    uaq_scale: float = 1.0
    train_norms: bool = option(False, SWITCH, "")  # set by the trainer


def rollout_options(vllm_config: Any) -> RolloutOptions:
    """The options in vLLM's configuration, which may be None; absent ones have their defaults.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    additional: Mapping[str, Any] = getattr(vllm_config, "additional_config", None) or {}
    options: Any = additional.get(KEY) or {}
    if isinstance(options, Mapping):
        options = {**options, "aqn": AQNConfig.from_mapping(options.get("aqn"))}
    return RolloutOptions.from_mapping(options)


def is_v2(part: Any) -> bool:
    """Whether a model runner, or a part of one, is vLLM's V2."""
    return type(part).__module__.startswith("vllm.v1.worker.gpu.")


def asked_of_vllm(vllm_config: Any) -> str | None:
    """The setting by which the user says which of vLLM's kernels to use, so that ours are not meant; or None."""
    from vllm import envs  # a driver may have none

    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1"
    backend = getattr(getattr(vllm_config, "kernel_config", None), "linear_backend", "auto")
    return None if backend == "auto" else f"linear_backend={backend!r}"
