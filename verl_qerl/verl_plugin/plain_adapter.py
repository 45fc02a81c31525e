"""Which adapters the rollout multiplies by as the actor does."""

from typing import Any

# Options of peft's LoraConfig -> the values that go; the rollout has one rank and one factor for all modules.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none",),
    "modules_to_save": (None, []),
}


def check_plain(config: Any) -> None:
    """Refuse an adapter that vLLM would compute without a part of it, which says nothing.

    Args:
        config: peft's LoraConfig.

    Raises:
        ValueError: It has another rank or factor for some modules, DoRA, biases or whole modules.
    """
    for name, accepted in _PLAIN.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            raise ValueError(
                f"the rollout would leave out a part of the adapter: {name}={value!r} in its adapter_config.json."
                f" Accepted is {accepted[0]!r}. Train another adapter, or merge this one into the model."
            )
