"""verl's FSDP engines on the CPU platform, which it registers for GPUs alone."""

from types import ModuleType
from typing import Any

import torch.nn as nn
from transformers import AutoModelForTokenClassification
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

_Stock: Any = FSDPEngineWithValueHead  # verl's untyped decorator hides the class from type checkers


class CPUValueEngine(_Stock):
    """FSDPEngineWithValueHead that takes the attention of `override_config`; verl's loads with flash-attn alone."""

    def _build_module(self) -> nn.Module:
        """A token classifier with one label, as verl's."""
        options = self.model_config
        config = options.hf_config
        config.update({"num_labels": 1, "classifier_dropout": 0.0})
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        context = get_init_weight_context_manager(use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh)
        with context():
            module = AutoModelForTokenClassification.from_pretrained(
                options.local_path, dtype=dtype, config=config, trust_remote_code=options.trust_remote_code
            )
            apply_monkey_patch(
                model=module,
                use_remove_padding=self.use_remove_padding,
                ulysses_sp_size=self.ulysses_sequence_parallel_size,
            )
            module.to(dtype)  # the new head is float32
        if options.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module


def install(module: ModuleType) -> None:
    """Register verl's own engine of language models, and the critic; a second call does nothing."""
    if CPUValueEngine in EngineRegistry._engines["value_model"]["fsdp2"].values():
        return
    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", CPUValueEngine)):
        EngineRegistry.register(kind, ["fsdp", "fsdp2"], "cpu")(engine)
