"""What verl's FSDP engine does differently where all weights are trained: UAQ, and quantizing at every sync."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn as nn
from verl.utils import tensordict_utils as tu

from verl_qerl.checkpoints.groups import groups_of_linears, linears_among
from verl_qerl.checkpoints.record import RECORD
from verl_qerl.modules.rounded import rounded_linears
from verl_qerl.modules.varlen_attention import check_model
from verl_qerl.verl_plugin.actor.resume import refuse_adapter, refuse_packed_base
from verl_qerl.verl_plugin.actor.uaq_engine import fold_model
from verl_qerl.verl_plugin.config.base_options import BaseOptions
from verl_qerl.verl_plugin.weight_sync.requantize import (
    ROUNDED,
    check_unquantized,
    quantized_for_rollout,
    round_group,
)

logger = logging.getLogger(__name__)


class TrainedWeights:
    """The engine's weights; without options they are as verl has them.

    Args:
        options: How the rollout is quantized; None if it takes the weights as they are.
    """

    def __init__(self, engine: Any, options: BaseOptions | None, uaq_scale: float | None) -> None:
        self.options = options
        self._engine, self._uaq_scale = engine, uaq_scale

    def build_module(self, stock: Callable[[], Any]) -> nn.Module:
        """Build verl's module; weights that a sync quantizes must not be quantized already."""
        if self.options is not None:
            check_unquantized(self._engine.model_config.local_path, self.options.format)
        module = stock()
        check_model(module)
        return module

    def build_lora_module(self, module: Any, stock: Callable[[Any], Any]) -> Any:
        """Build verl's module."""
        return stock(module)

    def build_fsdp_module(self, module: nn.Module, stock: Callable[[Any], Any]) -> nn.Module:
        """Build verl's module, after UAQ has scaled its weights."""
        if self._uaq_scale is not None:
            count = fold_model(module, self._uaq_scale)
            if self._engine.rank == 0:
                logger.warning("UAQ: %d weights scaled by %g", count, self._uaq_scale)
        return stock(module)

    def of_optimizer(self, module: nn.Module) -> nn.Module:
        """The whole module."""
        return module

    def inputs(self, micro_batch: Any) -> dict[str, Any]:
        """No further inputs."""
        return {}

    def forward_mode(self, data: Any) -> AbstractContextManager[Any]:
        """Round the linears as the rollout holds them, if the batch asks for it."""
        options = self.options
        if options is None or not tu.get_non_tensor_data(data, key=ROUNDED, default=False):
            return nullcontext()
        form = options.weight_format
        linears = linears_among(self._shapes(), options.ignore, "the actor", form)
        return rounded_linears(self._engine.module, groups_of_linears(linears, form), partial(round_group, form=form))

    def before_save(self, folder: Path) -> None:
        """Remove the record of an earlier run with an adapter, on rank 0; no record marks these files as whole."""
        (folder / RECORD).unlink(missing_ok=True)

    def after_save(self, folder: Path) -> None:
        """Do nothing."""

    def loadable(self, folder: Path) -> AbstractContextManager[Path]:
        """The checkpoint itself.

        Raises:
            CheckpointFormatError: It is of an adapter on a packed base, and this run quantizes all weights or none; on
                every rank alike.
        """
        if self.options is None:
            refuse_packed_base(folder)
        else:
            refuse_adapter(folder)
        return nullcontext(folder)

    def to_send(self, stock: Callable[[], Any], base_sync_done: bool) -> Any:
        """The parameters, quantized for the rollout one by one as they are sent."""
        params, peft_config = stock()
        options = self.options
        if options is not None:
            tied = self._engine.model_config.hf_config.tie_word_embeddings
            params = quantized_for_rollout(params, self._shapes(), options.weight_format, options.ignore, tied)
        return params, peft_config

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._engine.module.state_dict().items()}
