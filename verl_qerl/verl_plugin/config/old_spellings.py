"""Options that are refused: under the names that they had before they moved to one tree, and deleted ones."""

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

_BASE = "actor_rollout_ref.actor.fsdp_config.qerl"
_ROLLOUT = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.verl_qerl"
_KEPT = ("scale", "ignore", "train_norms", "fused_lora")
_KERNELS = ("linear", "lora", "sampler", "attention", "programmatic_launch")
NEW: dict[str, str] = {
    **{f"{_BASE}.{name}": f"qerl.base.{name}" for name in _KEPT},
    f"{_BASE}.share_base": "qerl.base.share",
    f"{_BASE}.shard_base": "qerl.base.shard",
    **{f"{_ROLLOUT}.{name}": f"qerl.rollout.{name}" for name in _KERNELS},
    f"{_ROLLOUT}.early_starts": "qerl.rollout.programmatic_launch",
    **{f"qerl.{name}": f"qerl.gate.{name}" for name in ("max_initial_kl", "max_kl", "mismatch_sample")},
}

# No run of verl was measured to gain 3 % by one of these (recipes/README.md, log of negative results).
DELETED = tuple(
    f"{node}.{name}"
    for nodes, names in (
        (("qerl.base", _BASE), ("keep_dense",)),
        (("qerl.rollout", _ROLLOUT), ("lm_head", "resident", "keep_base_resident")),
    )
    for node in nodes
    for name in names
)


def check_arguments(arguments: Iterable[str]) -> None:
    """Look at a command line, before Hydra says only that there is no such key.

    Args:
        arguments: `name=value`, with a `+` before it or not.

    Raises:
        ValueError: One has an old name, or is no option any more.
    """
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        if name in (*NEW, *DELETED):
            raise _refusal(name, value)


def check_names(config: DictConfig) -> None:
    """Look at a composed run, whose files may have old names.

    Args:
        config: The whole configuration, before `apply.py` has written into it.

    Raises:
        ValueError: One has an old name, or is no option any more.
    """
    for name in (*NEW, *DELETED):
        value = OmegaConf.select(config, name)
        if value is not None:
            raise _refusal(name, value)


def _refusal(name: str, value: object) -> ValueError:
    told = str(value).lower() if isinstance(value, bool) else value
    if name in DELETED:
        return ValueError(
            f"{name}={told} is an option that was deleted: no run gained 3 % by it. Accepted is a run without. Leave"
            " it out."
        )
    return ValueError(
        f"{name}={told} is an option under its old name. Accepted is {NEW[name]}. Write +{NEW[name]}={told}, or move it"
        " there in your file."
    )
