"""What verl's FSDP2 engine does differently where the base is packed and frozen, below an adapter.

Order of construction: an empty model, packed linears read into it, PEFT on top, FSDP2 around. Packed tensors are uint8
buffers, broadcast by verl to every rank, or with `qerl.base.shard` spread over the ranks. Adapters are float32,
whatever the base's dtype: an update of 1e-5 is lost in a bf16 parameter.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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

from verl_qerl.checkpoints.digest import check_same_base, model_digest, weight_digest
from verl_qerl.checkpoints.record import BaseRecord
from verl_qerl.modules.adapted_linear import fuse_adapters
from verl_qerl.modules.convert import packed_linears, packed_weights
from verl_qerl.modules.format_linear import PACKED_LINEARS
from verl_qerl.modules.placement.lending import Lender
from verl_qerl.modules.placement.sharded_linear import ShardedNVFP4Linear
from verl_qerl.modules.plain_adapter import check_plain
from verl_qerl.modules.trained_norm import train_norms
from verl_qerl.modules.varlen_attention import check_model
from verl_qerl.verl_plugin.actor.base_record import adapter_options, base_record
from verl_qerl.verl_plugin.actor.chunked_head import install_chunked_head
from verl_qerl.verl_plugin.actor.expert_adapters import adapt_attention_only
from verl_qerl.verl_plugin.actor.lend_base import lend_base
from verl_qerl.verl_plugin.actor.liger import apply_liger
from verl_qerl.verl_plugin.actor.memory_check import check_memory
from verl_qerl.verl_plugin.actor.packed_model import build_skeleton, load_packed
from verl_qerl.verl_plugin.actor.resume import PARTS, check_checkpoint, for_these_ranks, saved_files
from verl_qerl.verl_plugin.config.base_options import CHECKSUM, DIGESTS, LAYOUT, BaseOptions
from verl_qerl.verl_plugin.weight_sync.flat_adapter import FlatAdapter, adapter_checksum, pieces

logger = logging.getLogger(__name__)
_Build = Callable[[Any], Any]


class FrozenBase:
    """The engine's base.

    Attributes:
        lender: Lends the base to the rollout, with `qerl.base.share`.
    """

    def __init__(self, engine: Any, options: BaseOptions) -> None:
        self.options = options
        self.lender: Lender | None = None
        self._engine = engine
        self._adapter: FlatAdapter | None = None
        self._digests: dict[str, str] = {}
        self._digests_sent = False

    def build_module(self, stock: Callable[[], nn.Module]) -> nn.Module:
        """The model with packed linears, in place of what `stock` would load."""
        engine, options = self._engine, self.options
        model_config = engine.model_config
        check_memory(engine, options.run)
        config = model_config.hf_config
        dtype = PrecisionType.to_dtype(engine.engine_config.model_dtype)
        with init_empty_weights(include_buffers=False):
            auto_class: Any = get_hf_auto_model_class(hf_config=config)
            module = auto_class.from_config(config, dtype=dtype, trust_remote_code=model_config.trust_remote_code)
        check_model(module)
        shards = options.shard and torch.distributed.get_world_size() > 1
        kind = ShardedNVFP4Linear if shards else PACKED_LINEARS[options.format]
        linears = build_skeleton(module, model_config.local_path, options.ignore, kind)
        if self._reads_weights():
            load_packed(module, linears, model_config.local_path, options, dtype)
        if model_config.use_liger:
            apply_liger(module)
        apply_monkey_patch(
            model=module,
            use_remove_padding=engine.use_remove_padding,
            ulysses_sp_size=engine.ulysses_sequence_parallel_size,
        )
        if model_config.use_fused_kernels:
            kernels: Any = model_config.fused_kernel_options or {}
            install_chunked_head(module, kernels.get("impl_backend"), model_config.use_liger)
        if model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _reads_weights(self) -> bool:
        # As verl: one rank of a shard group reads and the others get their shards by broadcast; with tied embeddings
        # every rank reads, since materializing a meta model would untie them.
        tied = self._engine.model_config.hf_config.tie_word_embeddings
        context = get_init_weight_context_manager(use_meta_tensor=not tied, mesh=self._engine.device_mesh)
        return context is not init_empty_weights

    def build_lora_module(self, module: Any, stock: _Build) -> Any:
        """The model with an adapter, in float32."""
        adapt_attention_only(module, self._engine.model_config)
        module = stock(module)
        check_plain(adapter_options(module.peft_config["default"]), "Train another, or merge it into the model.")
        if self.options.train_norms:
            count = train_norms(module)
            if self._engine.rank == 0:
                logger.warning("trained norms: %d, with the adapter, in float32", count)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        fuse_adapters(module)
        return module

    def build_fsdp_module(self, module: nn.Module, stock: _Build) -> nn.Module:
        """The model spread over the ranks, whose base must be the same on all."""
        module = stock(module)
        digests = {name: weight_digest(weight) for name, weight in packed_weights(module)}
        for _, linear in packed_linears(module):
            linear.leave_out_of_checkpoints()
        first_rank = [digests]
        torch.distributed.broadcast_object_list(first_rank, src=0)
        check_same_base(first_rank[0], digests)
        self._digests = digests
        if self._engine.rank == 0:
            kind = self.options.format
            logger.warning("packed base: %d linears in %s, digest %s", len(digests), kind, model_digest(digests))
        if self.options.share:
            self.lender = lend_base(module, self._engine.rank)
        return module

    def of_optimizer(self, module: nn.Module) -> Any:
        """The module without its packed bytes, so that runs with and without qerl.base.shard resume each other."""
        named = module.named_parameters
        return SimpleNamespace(parameters=lambda: (p for name, p in named() if not name.endswith(".packed_bytes")))

    def inputs(self, micro_batch: Any) -> dict[str, Any]:
        """Further inputs of the model: whether a head that gives log-probs shall give the entropy too."""
        if not tu.get_non_tensor_data(micro_batch, "use_fused_kernels", default=False):
            return {}
        return {"calculate_entropy": tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False)}

    def forward_mode(self, data: Any) -> AbstractContextManager[Any]:
        """Do nothing: the passes are verl's."""
        return nullcontext()

    def before_save(self, folder: Path) -> None:
        """Rank 0 writes the record without files: those that follow are not complete yet."""
        folder.mkdir(parents=True, exist_ok=True)
        self._record().write(folder)

    def after_save(self, folder: Path) -> None:
        """Rank 0 writes which base the shards belong to, which also marks them as whole."""
        files = saved_files(folder, self._engine.checkpoint_manager.checkpoint_save_contents)
        if self._engine.rank == 0:
            replace(self._record(), files=files).write(folder)

    def loadable(self, folder: Path) -> AbstractContextManager[Path]:
        """The checkpoint as verl can load it: whole, of this base and adapter; LoRA-only: of any number of ranks.

        Raises:
            CheckpointFormatError: It is not, on every rank alike.
        """
        engine, manager = self._engine, self._engine.checkpoint_manager
        parts = [part for part in PARTS if part in manager.checkpoint_load_contents]
        held = self._record()
        record = check_checkpoint(folder, held, parts)
        return for_these_ranks(folder, record, held, parts, engine.module, engine.optimizer)

    def _record(self) -> BaseRecord:
        engine = self._engine
        config = engine.module.peft_config["default"]
        record = base_record(engine.model_config.path, self.options, self._digests, config, engine.device_mesh)
        return replace(record, lora_only=bool(engine.checkpoint_manager.should_save_lora_only))

    def to_send(self, stock: Callable[[], Any], base_sync_done: bool) -> Any:
        """The adapter as one tensor, in pieces; verl's parameters before the first sync.

        What is where and a checksum travel with its configuration, and with the first one the digests of the base,
        which the rollout compares with its own.
        """
        if not base_sync_done:
            return stock()
        module = self._engine.module
        if self._adapter is None:
            self._adapter = FlatAdapter(module, _adapter_names(module), torch.device(get_device_name()))
        flat = self._adapter.gather()
        peft_config = module.peft_config["default"].to_dict()
        peft_config |= {LAYOUT: self._adapter.layout, CHECKSUM: adapter_checksum(flat)}
        if not self._digests_sent:
            if self.lender is not None:
                self.lender.check_taken()
            peft_config[DIGESTS] = self._digests
            self._digests_sent = True
        return pieces(flat), peft_config


def _adapter_names(module: Any) -> dict[str, str]:
    """Name under which PEFT saves a parameter of the adapter -> its name here."""
    parameters = dict(module.named_parameters())
    saved = convert_weight_keys(get_peft_model_state_dict(module, state_dict=parameters), module)
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {name: names[id(parameter)] for name, parameter in saved.items()}
