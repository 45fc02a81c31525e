"""The attention of actor, reference and critic where the user names none.

verl's default is flash_attention_2, of a package that is not installed with verl. Without it transformers fails once
Ray has started; runs with an option of ours then take attention that torch has (modules/varlen_attention.py).
"""

import functools
import importlib
import importlib.util
import logging

from omegaconf import DictConfig, OmegaConf

from verl_qerl.modules.varlen_attention import NAME
from verl_qerl.options.rules import FSDP_STRATEGIES, MODEL, trains_critic
from verl_qerl.verl_plugin.config.nodes import run_of

logger = logging.getLogger(__name__)

_OPTION = "override_config.attn_implementation"


@functools.cache
def has_flash_attn() -> bool:
    """Whether flash-attn can be imported; an installed build may be for another torch."""
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def default_attention() -> str:
    """What `attn_implementation` is in a run with an option of ours that does not set it."""
    return "flash_attention_2" if has_flash_attn() else NAME


def check_attention(config: DictConfig) -> None:
    """Refuse with a ValueError a run with an option of ours that asks for flash-attn where it cannot be imported."""
    for model in _models(config):
        asked = OmegaConf.select(config, f"{model}.{_OPTION}")
        # transformers takes flash attention from the hub where `kernels` is installed.
        if asked == "flash_attention_2" and not has_flash_attn() and importlib.util.find_spec("kernels") is None:
            raise ValueError(
                f"{model}.{_OPTION}=flash_attention_2 needs flash-attn, which cannot be imported. Accepted are"
                f" {NAME}, which needs torch alone, sdpa and eager. Leave the option out, or install flash-attn."
            )


def use_attention(config: DictConfig) -> None:
    """Name the attention of a run with an option of ours, in place; what the user named stays."""
    for model in _models(config):
        if not has_flash_attn() and OmegaConf.select(config, f"{model}.{_OPTION}") is None:
            OmegaConf.update(config, f"{model}.{_OPTION}", NAME, force_add=True)
            logger.warning("verl_qerl: %s.%s is %s, since flash-attn is not installed", model, _OPTION, NAME)


def _models(config: DictConfig) -> list[str]:
    """Nodes of models that FSDP trains or scores."""
    if OmegaConf.select(config, "actor_rollout_ref.actor.strategy") not in FSDP_STRATEGIES:
        return []
    return [MODEL, "critic.model"] if trains_critic(run_of(config)) else [MODEL]
