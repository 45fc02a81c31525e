"""Which linears of a mixture of experts an actor adapts: those of the attention."""

import logging
from typing import Any

import torch.nn as nn
from peft import PeftConfig

from verl_qerl import upstream
from verl_qerl.checkpoints.experts import ADAPTED
from verl_qerl.modules.nvfp4_experts import NVFP4Experts
from verl_qerl.verl_plugin import hosts

logger = logging.getLogger(__name__)


def adapt_attention_only(model: nn.Module, config: Any) -> None:
    """Let `target_modules=all-linear` mean the attention where experts are packed, and refuse other targets.

    PEFT 0.21 takes `all-linear` of such a model for adapters on the experts' stacked weights, which a packed base does
    not have, and on the router, and leaves out its dense MLPs.

    Args:
        model: Before PEFT.
        config: verl's HFModelConfig; its target_modules may be set.

    Raises:
        ValueError: The targets are not all among q_proj, k_proj, v_proj and o_proj.
    """
    if not any(isinstance(module, NVFP4Experts) for module in model.modules()):
        return
    where: Any = config
    if config.lora_adapter_path is not None:
        where = PeftConfig.from_pretrained(config.lora_adapter_path)
    elif config.target_modules == "all-linear":
        upstream.set_data(hosts.MODEL_CONFIG, config, target_modules=list(ADAPTED))
        logger.warning("adapters are put on %s; experts and router carry none", ", ".join(ADAPTED))
    targets = where.target_modules or ()
    asked = {targets} if isinstance(targets, str) else set(targets)
    if not asked or asked - set(ADAPTED) or where.target_parameters:
        raise ValueError(
            f"adapters of a packed mixture of experts: model.target_modules={targets}, model.target_parameters="
            f"{where.target_parameters}. Accepted are {', '.join(ADAPTED)}, or all-linear for these."
            " Leave both options out."
        )
