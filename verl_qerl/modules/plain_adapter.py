"""Which adapters actor, rollout and exports compute alike: plain LoRA (arXiv 2106.09685) and rsLoRA (2312.03732)."""

from collections.abc import Mapping
from typing import Any

# Options of peft's LoraConfig that are honoured everywhere, or that act in training alone.
_HONOURED = frozenset({"r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules"})
_TRAINING = frozenset({"lora_dropout", "init_lora_weights"})
# Initial values of A and B; the others of PEFT also change the base.
_PLAIN_INIT = (True, False, "gaussian", "orthogonal")


def check_plain(options: Mapping[str, Any], remedy: str) -> None:
    """Refuse with a ValueError an adapter that is no plain LoRA: rollout or exports would silently leave out a part.

    Args:
        options: The options of PEFT's LoraConfig that differ from its defaults.
    """
    for name, value in options.items():
        known = name in _HONOURED | _TRAINING
        if not known or (name == "init_lora_weights" and value not in _PLAIN_INIT):
            raise ValueError(
                f"no plain LoRA: {name}={value!r} of PEFT's LoraConfig. LoRA and rsLoRA of one rank and factor are"
                f" accepted, since rollout and exports compute no others. {remedy}"
            )
