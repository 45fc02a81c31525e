"""Options under the names that they had until they moved to one tree: refused, with the name that they have now."""

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

_BASE = "actor_rollout_ref.actor.fsdp_config.qerl"
_ROLLOUT = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.verl_qerl"
_KEPT = ("scale", "ignore", "train_norms", "keep_dense", "fused_lora")
_KERNELS = (
    "linear",
    "lora",
    "lm_head",
    "sampler",
    "attention",
    "programmatic_launch",
    "keep_base_resident",
)
NEW: dict[str, str] = {
    **{f"{_BASE}.{name}": f"qerl.base.{name}" for name in _KEPT},
    f"{_BASE}.share_base": "qerl.base.share",
    f"{_BASE}.shard_base": "qerl.base.shard",
    **{f"{_ROLLOUT}.{name}": f"qerl.rollout.{name}" for name in _KERNELS},
    f"{_ROLLOUT}.early_starts": "qerl.rollout.programmatic_launch",
    **{f"qerl.{name}": f"qerl.gate.{name}" for name in ("max_initial_kl", "max_kl", "mismatch_sample")},
}


def check_arguments(arguments: Iterable[str]) -> None:
    """Look at a command line, before Hydra says only that there is no such key.

    Args:
        arguments: `name=value`, with a `+` before it or not.

    Raises:
        ValueError: One has an old name.
    """
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        if name in NEW:
            raise _moved(name, value)


def check_names(config: DictConfig) -> None:
    """Look at a composed run, whose files may have old names.

    Args:
        config: Of the whole run, before `apply.py` has written into it.

    Raises:
        ValueError: One has an old name.
    """
    for name in NEW:
        value = OmegaConf.select(config, name)
        if value is not None:
            raise _moved(name, value)


def _moved(name: str, value: object) -> ValueError:
    told = str(value).lower() if isinstance(value, bool) else value
    return ValueError(
        f"{name}={told} is an option under its old name. Accepted is {NEW[name]}. Write +{NEW[name]}={told}, or move it"
        " there in your file."
    )
