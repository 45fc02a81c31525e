"""verl's FSDP2 engine with a packed, frozen base; or with all weights trained, and quantized as they are sent.

Chosen by verl's registry through the vendor key, before the stock class; without our options it is the stock class.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from accelerate import init_empty_weights
from peft import get_peft_model_state_dict
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.model import convert_weight_keys, get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_qerl import upstream
from verl_qerl.algos.uaq import write_record
from verl_qerl.checkpoints.digest import check_same_base, model_digest, weight_digest
from verl_qerl.checkpoints.groups import linears_among
from verl_qerl.checkpoints.record import BaseRecord, remove_record
from verl_qerl.modules import varlen_attention
from verl_qerl.modules.adapted_linear import fuse_adapters
from verl_qerl.modules.convert import packed_linears, packed_weights
from verl_qerl.modules.format_linear import PACKED_LINEARS
from verl_qerl.modules.placement.lending import Lender
from verl_qerl.modules.placement.sharded_linear import ShardedNVFP4Linear
from verl_qerl.modules.plain_adapter import check_plain
from verl_qerl.modules.rounded import rounded_linears
from verl_qerl.modules.trained_norm import train_norms
from verl_qerl.verl_plugin.actor.base_record import adapter_options, base_record, recorded_path
from verl_qerl.verl_plugin.actor.chunked_head import install_chunked_head
from verl_qerl.verl_plugin.actor.dense_base import DenseBase
from verl_qerl.verl_plugin.actor.expert_adapters import adapt_attention_only
from verl_qerl.verl_plugin.actor.lend_base import lend_base
from verl_qerl.verl_plugin.actor.liger import apply_liger
from verl_qerl.verl_plugin.actor.memory_check import check_memory
from verl_qerl.verl_plugin.actor.packed_model import build_skeleton, load_packed
from verl_qerl.verl_plugin.actor.recompute import Recompute
from verl_qerl.verl_plugin.actor.resume import check_checkpoint, for_these_ranks, saved_files
from verl_qerl.verl_plugin.actor.uaq_engine import check_scale, fold_model
from verl_qerl.verl_plugin.config.base_options import CHECKSUM, DIGESTS, LAYOUT, BaseOptions
from verl_qerl.verl_plugin.config.sequence_parallel import SequenceParallelMixin
from verl_qerl.verl_plugin.shims import LOG_PROBS
from verl_qerl.verl_plugin.weight_sync.flat_adapter import FlatAdapter, adapter_checksum, pieces
from verl_qerl.verl_plugin.weight_sync.requantize import (
    ROUNDED,
    check_unquantized,
    groups_of_linears,
    quantized_for_rollout,
    round_group,
)

logger = logging.getLogger(__name__)

_Stock: Any = FSDPEngineWithLMHead  # verl's untyped decorator hides the class from type checkers


class QerlFSDPEngine(SequenceParallelMixin, _Stock):
    """FSDPEngineWithLMHead whose decoder linears are PackedLinear when `engine_config.qerl` is set.

    Order of construction: an empty model, packed linears read into it, PEFT on top, FSDP2 around. Packed tensors
    are uint8 buffers, broadcast by verl to every rank, or with `qerl.base.shard` spread over the ranks. Adapters are
    float32, whatever the base's dtype: an update of 1e-5 is lost in a bf16 parameter.
    """

    _adapter: FlatAdapter | None = None
    _digests: dict[str, str] | None = None
    _digests_sent = False
    _dense: DenseBase | None = None
    _lender: Lender | None = None
    _recompute: Recompute | None = None

    @property
    def _base(self) -> BaseOptions | None:
        options = getattr(self.engine_config, "qerl", None)
        return options if options is not None and options.has_adapter else None

    @property
    def _requantized(self) -> BaseOptions | None:
        options = getattr(self.engine_config, "qerl", None)
        return None if options is None or options.has_adapter else options

    @property
    def _uaq_scale(self) -> float | None:
        return getattr(self.engine_config, "uaq_scale", None)

    def _build_module(self) -> nn.Module:
        if getattr(self.engine_config, "qerl", None) is not None:
            upstream.install(LOG_PROBS)
        if self._requantized is not None:
            check_unquantized(self.model_config.local_path, self._requantized.format)
        if self._base is None:
            module = super()._build_module()
            varlen_attention.check_model(module)
            return module
        check_memory(self, self._base.run)
        config = self.model_config.hf_config
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        with init_empty_weights(include_buffers=False):
            auto_class: Any = get_hf_auto_model_class(hf_config=config)
            module = auto_class.from_config(config, dtype=dtype, trust_remote_code=self.model_config.trust_remote_code)
        varlen_attention.check_model(module)
        shards = self._base.shard and torch.distributed.get_world_size() > 1
        kind = ShardedNVFP4Linear if shards else PACKED_LINEARS[self._base.format]
        form = self._base.weight_format
        linears = build_skeleton(module, self.model_config.local_path, self._base.ignore, kind, form)
        if self._reads_weights():
            load_packed(module, linears, self.model_config.local_path, self._base, dtype)
        if self.model_config.use_liger:
            apply_liger(module)
        apply_monkey_patch(
            model=module,
            use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=self.ulysses_sequence_parallel_size,
        )
        if self.model_config.use_fused_kernels:
            options: Any = self.model_config.fused_kernel_options or {}
            install_chunked_head(module, options.get("impl_backend"), self.model_config.use_liger)
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _reads_weights(self) -> bool:
        # As verl: one rank of a shard group reads and the others get their shards by broadcast; with tied embeddings
        # every rank reads, since materializing a meta model would untie them.
        tied = self.model_config.hf_config.tie_word_embeddings
        context = get_init_weight_context_manager(use_meta_tensor=not tied, mesh=self.device_mesh)
        return context is not init_empty_weights

    def _build_lora_module(self, module: Any) -> Any:
        if self._base is not None:
            adapt_attention_only(module, self.model_config)
        module = super()._build_lora_module(module)
        if self._base is not None:
            check_plain(adapter_options(module.peft_config["default"]), "Train another, or merge it into the model.")
            if self._base.train_norms:
                count = train_norms(module)
                if self.rank == 0:
                    logger.warning("trained norms: %d, with the adapter, in float32", count)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            if self._base.fused_lora:
                fuse_adapters(module)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        if self._uaq_scale is not None:
            count = fold_model(module, self._uaq_scale)
            if self.rank == 0:
                logger.warning("UAQ: %d weights scaled by %g", count, self._uaq_scale)
        module = super()._build_fsdp_module(module)
        if self._base is not None:
            digests = {name: weight_digest(weight) for name, weight in packed_weights(module)}
            for _, linear in packed_linears(module):
                linear.leave_out_of_checkpoints()
            first_rank = [digests]
            torch.distributed.broadcast_object_list(first_rank, src=0)
            check_same_base(first_rank[0], digests)
            self._digests = digests
            if self.rank == 0:
                kind = self._base.format
                logger.warning("packed base: %d linears in %s, digest %s", len(digests), kind, model_digest(digests))
            if self._base.share:
                self._lender = lend_base(module, self.rank)
        if (self._base or self._requantized) and not self.model_config.enable_activation_offload:
            self._recompute = Recompute(module, torch.device(get_device_name()))
        return module

    def _build_optimizer(self, module: nn.Module) -> Any:
        # As without qerl.base.shard, so that the states of both are the same, and one resumes the other.
        seen: Any = module if self._base is None else _WithoutPackedBytes(module)
        return super()._build_optimizer(seen)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """As verl's; where the head gives log-probs, it is told whether the entropy is wanted."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._base is not None and tu.get_non_tensor_data(micro_batch, "use_fused_kernels", default=False):
            inputs["calculate_entropy"] = tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False)
        return inputs, output_args

    def train_mode(self, **kwargs: Any) -> Any:
        """As verl's, with the dense copy of the base if it is asked for, and layers that need no recomputation."""
        mode = self._with_dense(super().train_mode(**kwargs), training=True)
        settled = self._dense is None or self._dense.fits is not None
        return mode if self._recompute is None else self._recompute.within(mode, settled)

    def eval_mode(self, **kwargs: Any) -> Any:
        """As verl's, with the dense copy of the base if it is asked for."""
        return self._with_dense(super().eval_mode(**kwargs), training=False)

    def _with_dense(self, mode: Any, training: bool) -> Any:
        if self._base is None or not self._base.keep_dense:
            return mode
        if self._dense is None:
            self._dense = DenseBase([linear for _, linear in packed_linears(self.module)])
        return self._dense.within(mode, training)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """As verl's; at the end rank 0 writes which base the shards belong to, which also marks them as whole."""
        folder = Path(local_path)
        if self.rank == 0:  # verl's barrier comes before the first file is replaced
            if self._base is not None:
                remove_record(folder)
            write_record(folder, self._uaq_scale, recorded_path(self.model_config.path))
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._base is None:
            return
        files = saved_files(folder, self.checkpoint_manager.checkpoint_save_contents)
        if self.rank == 0:
            replace(self._record(self._base), files=files).write(folder)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """As verl's, of a checkpoint that is whole and of this base and adapter; LoRA-only: of any number of ranks.

        Raises:
            CheckpointFormatError: It is not; the model is as it was, on every rank. Also where UAQ scaled the weights
                of one of the two.
        """
        check_scale(Path(local_path), self._uaq_scale)
        if self._base is None:
            super().load_checkpoint(local_path, *args, **kwargs)
            return
        parts = [
            part for part in ("model", "optimizer", "extra") if getattr(self.checkpoint_manager, f"should_load_{part}")
        ]
        held = self._record(self._base)
        record = check_checkpoint(Path(local_path), held, parts)
        with for_these_ranks(Path(local_path), record, held, parts, self.module, self.optimizer) as folder:
            super().load_checkpoint(str(folder), *args, **kwargs)

    def _record(self, base: BaseOptions) -> BaseRecord:
        config = self.module.peft_config["default"]
        record = base_record(self.model_config.path, base, self._digests or {}, config, self.device_mesh)
        return replace(record, lora_only=bool(self.checkpoint_manager.should_save_lora_only))

    def forward_backward_batch(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """As verl's; where the batch asks for it, with the linears rounded as the rollout holds them."""
        options = self._requantized
        if options is None or not tu.get_non_tensor_data(data, key=ROUNDED, default=False):
            return super().forward_backward_batch(data, *args, **kwargs)
        form = options.weight_format
        linears = linears_among(self._shapes(), options.ignore, "the actor", form)
        rounding = partial(round_group, form=form)
        with rounded_linears(self.module, groups_of_linears(linears, form), rounding):
            return super().forward_backward_batch(data, *args, **kwargs)

    def get_per_tensor_param(self, *args: Any, base_sync_done: bool = False, **kwargs: Any) -> Any:
        """As verl's; on our base the adapter is one tensor, in pieces.

        What is where and a checksum travel with its configuration, and with the first one the digests of the base,
        which the rollout compares with its own. Where all weights are trained they are quantized for the rollout, one
        by one as they are sent.
        """
        if self._base is None or not base_sync_done:
            params, peft_config = super().get_per_tensor_param(*args, base_sync_done=base_sync_done, **kwargs)
            if self._requantized is not None:
                params = self._quantized(params, self._requantized)
            return params, peft_config
        if self._adapter is None:
            self._adapter = FlatAdapter(self.module, self._adapter_names(), torch.device(get_device_name()))
        flat = self._adapter.gather()
        peft_config = self.module.peft_config["default"].to_dict()
        peft_config |= {LAYOUT: self._adapter.layout, CHECKSUM: adapter_checksum(flat)}
        if not self._digests_sent:
            if self._lender is not None:
                self._lender.check_taken()
            peft_config[DIGESTS] = self._digests
            self._digests_sent = True
        return pieces(flat), peft_config

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.module.state_dict().items()}

    def _quantized(self, params: Any, options: BaseOptions) -> Any:
        tied = self.model_config.hf_config.tie_word_embeddings
        return quantized_for_rollout(params, self._shapes(), options.weight_format, options.ignore, tied)

    def _adapter_names(self) -> dict[str, str]:
        """Name under which PEFT saves a parameter of the adapter -> its name here."""
        parameters = dict(self.module.named_parameters())
        saved = convert_weight_keys(get_peft_model_state_dict(self.module, state_dict=parameters), self.module)
        names = {id(parameter): name for name, parameter in parameters.items()}
        return {name: names[id(parameter)] for name, parameter in saved.items()}


class _WithoutPackedBytes:
    """The parameters of a model that an optimizer may see."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for name, p in self._module.named_parameters() if not name.endswith(".packed_bytes"))


def install(module: ModuleType) -> None:
    """Register the engine ahead of the stock one, and the attention that needs no flash-attn; again: nothing."""
    varlen_attention.register()
    registered = EngineRegistry._engines["language_model"]["fsdp2"]
    if QerlFSDPEngine in registered.values():
        return
    for device, vendor in (("cuda", "nvidia"), ("cpu", "cpu")):
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device, vendor)(QerlFSDPEngine)
