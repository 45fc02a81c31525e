"""verl's FSDP engine with a packed, frozen base, or with all weights trained and quantized when they are sent.

Chosen by verl's registry through the vendor key, before the stock class; without our options it is the stock class.
What differs is in `FrozenBase` and `TrainedWeights`, one of which an engine has.
"""

import logging
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_qerl import upstream
from verl_qerl.algos.uaq import write_record
from verl_qerl.modules import varlen_attention
from verl_qerl.verl_plugin.actor.base_record import recorded_path
from verl_qerl.verl_plugin.actor.frozen_base import FrozenBase
from verl_qerl.verl_plugin.actor.recompute import Recompute
from verl_qerl.verl_plugin.actor.resume import PARTS
from verl_qerl.verl_plugin.actor.trained_weights import TrainedWeights
from verl_qerl.verl_plugin.actor.uaq_engine import check_scale
from verl_qerl.verl_plugin.config.base_options import BaseOptions
from verl_qerl.verl_plugin.shims import CRITIC, LOG_PROBS
from verl_qerl.verl_plugin.weight_sync.merged_adapter import adapted_weights, merged_parameters

logger = logging.getLogger(__name__)
_Stock: Any = FSDPEngineWithLMHead  # verl's untyped decorator hides the class from type checkers


class QerlFSDPEngine(_Stock):
    """FSDPEngineWithLMHead whose model is as `engine_config.qerl` and `engine_config.uaq_scale` say."""

    _recompute: Recompute | None = None

    @cached_property
    def weights(self) -> FrozenBase | TrainedWeights:
        """How the engine holds its weights; chosen once."""
        options: BaseOptions | None = getattr(self.engine_config, "qerl", None)
        if options is not None and options.has_adapter:
            return FrozenBase(self, options)
        return TrainedWeights(self, options, self._uaq_scale)

    @property
    def _uaq_scale(self) -> float | None:
        return getattr(self.engine_config, "uaq_scale", None)

    def _build_module(self) -> nn.Module:
        if self.weights.options is not None:
            upstream.install(LOG_PROBS)
        return self.weights.build_module(super()._build_module)

    def _build_lora_module(self, module: Any) -> Any:
        return self.weights.build_lora_module(module, super()._build_lora_module)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        module = self.weights.build_fsdp_module(module, super()._build_fsdp_module)
        if self.weights.options is not None and not self.model_config.enable_activation_offload:
            self._recompute = Recompute(module, torch.device(get_device_name()))
        return module

    def _build_optimizer(self, module: nn.Module) -> Any:
        return super()._build_optimizer(self.weights.of_optimizer(module))

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """The inputs of verl's model, and those of our head."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        inputs.update(self.weights.inputs(micro_batch))
        return inputs, output_args

    def train_mode(self, **kwargs: Any) -> Any:
        """Enter verl's training mode, in which as many layers keep their activations as memory allows."""
        mode = super().train_mode(**kwargs)
        return mode if self._recompute is None else self._recompute.within(mode)

    def forward_backward_batch(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run verl's passes, with rounded linears where the batch asks for them."""
        with self.weights.forward_mode(data):
            return super().forward_backward_batch(data, *args, **kwargs)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Write verl's checkpoint and our records."""
        folder = Path(local_path)
        if self.rank == 0:  # verl's barrier comes before the first file is replaced
            self.weights.before_save(folder)
            write_record(folder, self._uaq_scale, recorded_path(self.model_config.path))
        super().save_checkpoint(local_path, *args, **kwargs)
        self.weights.after_save(folder)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint that fits this run.

        Raises:
            CheckpointFormatError: It does not fit, or UAQ scaled the weights of only one of the two. The model is left
                unchanged, on every rank.
        """
        check_scale(Path(local_path), self._uaq_scale)
        with self.weights.loadable(Path(local_path)) as folder:
            super().load_checkpoint(str(folder), *args, **kwargs)
        contents = self.checkpoint_manager.checkpoint_load_contents
        left_out = [part for part in PARTS if part not in contents]
        if left_out and self.rank == 0:
            told = contents, ", ".join(left_out), local_path
            logger.warning("not resumed, as checkpoint.load_contents=%s leaves it out: %s of %s", *told)

    def get_per_tensor_param(self, *args: Any, base_sync_done: bool = False, **kwargs: Any) -> Any:
        """The tensors of a weight sync, in the form that our rollout takes."""
        stock = partial(super().get_per_tensor_param, *args, base_sync_done=base_sync_done, **kwargs)
        return self.weights.to_send(stock, base_sync_done)

    def _merged_lora_per_tensor_param(self) -> Any:
        adapted = adapted_weights(self.module)
        return super()._merged_lora_per_tensor_param() if adapted is None else merged_parameters(self, adapted)


def install(module: ModuleType) -> None:
    """Register the engine ahead of the stock one, and the attention that needs no flash-attn; again: nothing.

    A critic, whose engine is verl's, gets that attention too.
    """
    varlen_attention.register()
    upstream.install(CRITIC)
    registered = EngineRegistry._engines["language_model"]["fsdp2"]
    if QerlFSDPEngine in registered.values():
        return
    for device, vendor in (("cuda", "nvidia"), ("cpu", "cpu")):
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device, vendor)(QerlFSDPEngine)
