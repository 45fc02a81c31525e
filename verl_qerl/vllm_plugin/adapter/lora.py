"""The path for one adapter: vLLM's LoRA layers with our operators, `linear_ops` or those of `kernels.rollout.lora`.

It is taken when `max_loras` is 1. Then a token has the one adapter or none, which a mask tells, under CUDA graphs too;
vLLM never schedules a second adapter into a batch. A and B of a fused linear are stacked into one tensor each, of which
vLLM's own buffers become views, so that its ways of loading an adapter keep working.
"""

import functools
import logging
from typing import Any

import torch
from vllm.lora import layers as vllm_layers
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from verl_qerl import upstream
from verl_qerl.kernels.rollout.lora import lora_expand, lora_shrink, member_of_tile
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.weights.linear import repacked_tensors
from verl_qerl.vllm_plugin.weights.linear_ops import lora_linear_repacked

logger = logging.getLogger(__name__)

# vLLM's layers that go on the path: those that are on record as exchanged.
_CONVERTED = tuple(getattr(vllm_layers, change.target.rpartition(":")[2]) for change in hosts.LORA_LINEARS)
# Of linears that compute what their quantization method does, and nothing else.
_FORWARDS = (ColumnParallelLinear.forward, ReplicatedLinear.forward, RowParallelLinear.forward)


def release_buffers(model: torch.nn.Module, lora_config: Any) -> None:
    """Free vLLM's own buffers of the linears that `use_single_adapter` will take; only their shapes remain.

    Call it where they were allocated: in the memory of sleep mode, of which only what is free when loading ends is
    given back; the rest is copied to the host whenever the engine falls asleep.

    Args:
        model: vLLM's, with its LoRA layers and no adapter.
    """
    if _why_not(lora_config):
        return
    for layer in _taken(model):
        a, b = (tuple(part.to("meta") for part in stacked) for stacked in (layer.lora_a_stacked, layer.lora_b_stacked))
        upstream.set_data(hosts.LORA_BUFFERS, layer, lora_a_stacked=a, lora_b_stacked=b)


def use_single_adapter(model: torch.nn.Module, lora_config: Any) -> int:
    """Put the LoRA linears of `model` on the path for one adapter, and return their number.

    Call it after loading, before an adapter comes and before anything is compiled. Linears that it does not take keep
    vLLM's path, and the reason is logged.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseLayerWithLoRA)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no LoRA layers although LoRA is enabled. Its linears must be among those that"
            " vLLM can adapt. Check lora_target_modules."
        )
    reason = _why_not(lora_config)
    if reason:
        logger.warning("verl_qerl: LoRA runs on vLLM's kernels for many adapters: %s.", reason)
        return 0
    linears = _taken(model)
    left = [layer for layer in layers if layer not in linears]
    if left:
        names = ", ".join(sorted({type(layer).__name__ for layer in left}))
        logger.warning("verl_qerl: %s stay on vLLM's kernels for many adapters.", names)
    # One wrapper holds the batch of all layers that see the same tokens: a model with images has several.
    wrappers = {id(layer.punica_wrapper): layer.punica_wrapper for layer in linears}
    stock = {id(getattr(layer, "punica_wrapper", None)) for layer in left}
    active = {key: _track_active(wrapper, only_ours=key not in stock) for key, wrapper in wrappers.items()}
    for layer in linears:
        _convert(layer, active[id(layer.punica_wrapper)])
    return len(linears)


def compute_plain_logits(model: torch.nn.Module) -> None:
    """Make vLLM compute logits without its LoRA for the head, which verl cannot train.

    Its kernels take a row for each request. The logits of a whole prompt (prompt_logprobs) have a row for each token,
    which ends an engine on the CPU.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, vllm_layers.LogitsProcessorWithLoRA):
            model.set_submodule(name, module.base_layer)


def _taken(model: torch.nn.Module) -> list[Any]:
    """The LoRA layers that our path can take."""
    return [layer for layer in model.modules() if type(layer) in _CONVERTED and not _is_odd(layer)]


def _why_not(lora_config: Any) -> str | None:
    if lora_config.max_loras != 1:
        return f"max_loras is {lora_config.max_loras}, and the faster path is for one adapter"
    if lora_config.fully_sharded_loras:
        return "fully_sharded_loras is on"
    if lora_config.lora_dtype != torch.bfloat16:
        return f"the adapter is {lora_config.lora_dtype}, and the faster path is for bfloat16"
    return None


def _is_odd(layer: Any) -> bool:
    """Whether our operators cannot take its columns, or its base has a forward pass of its own (GateLinear)."""
    return any(size % 16 for size in layer.output_slices) or type(layer.base_layer).forward not in _FORWARDS


def _track_active(wrapper: Any, only_ours: bool) -> torch.Tensor:
    """A bool on the CPU that `wrapper` keeps: true while no token of the batch has an adapter."""
    wrapper.qerl_none_active = torch.ones(1, dtype=torch.bool)
    upstream.swap_class(hosts.LORA_WRAPPER, wrapper, _with_tracking(type(wrapper), only_ours))
    return wrapper.qerl_none_active


@functools.cache
def _with_tracking(base: type, only_ours: bool) -> type:
    class TracksActive(base):
        def update_metadata(
            self, mapping: Any, lora_index_to_id: list, max_loras: int, vocab_size: int, **kwargs: Any
        ) -> None:
            """Update vLLM's metadata; tokens are sorted by adapter only if a kernel of vLLM's is left that needs it."""
            if only_ours:
                self.is_prefill = mapping.is_prefill
                self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
            else:
                super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
            self.qerl_none_active.fill_(not any(mapping.index_mapping))

    return TracksActive


def _convert(layer: Any, none_active: torch.Tensor) -> None:
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    rank, slices = b[0].shape[-1], tuple(part.shape[2] for part in b)
    where = {"dtype": a[0].dtype, "device": layer.device}
    layer.qerl_a = torch.zeros(len(a) * rank, a[0].shape[-1], **where)
    layer.qerl_b = torch.zeros(sum(slices), rank, **where)
    layer.qerl_members = member_of_tile(slices, layer.qerl_b.device)
    layer.qerl_none_active = none_active
    a = tuple(part[None, None] for part in layer.qerl_a.split(rank))
    b = tuple(part[None, None] for part in layer.qerl_b.split(slices))
    upstream.set_data(hosts.LORA_BUFFERS, layer, lora_a_stacked=a, lora_b_stacked=b)
    upstream.swap_class(hosts.LORA_LINEARS, layer, _single(type(layer)))


@functools.cache
def _single(base: type) -> type:
    class Single(base):
        def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """The base product and the adapter's; x [..., K], result [..., N]."""
            flat = x.reshape(-1, x.shape[-1])
            adapter = (self.qerl_b, self.qerl_members, self.punica_wrapper._token_lora_indices, self.qerl_none_active)
            if hasattr(self.base_layer, "qerl_plan"):
                tensors = repacked_tensors(self.base_layer)
                out = lora_linear_repacked(flat, *tensors, bias, self.base_layer.qerl_plan, self.qerl_a, *adapter)
            else:
                partial = lora_shrink(flat, self.qerl_a, self.qerl_none_active)
                y = self._get_quant_method().apply(self.base_layer, flat, bias)
                out = lora_expand(y, partial, *adapter, None, flat.shape[-1])
            return out.view(*x.shape[:-1], out.shape[-1])

    Single.__name__ = Single.__qualname__ = f"Single{base.__name__}"
    return Single
