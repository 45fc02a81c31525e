"""Steps in which each sequence gets one token run on `kernels.rollout.attention`.

All other steps (prompts, chunks of prompts, cascade attention, speculation) stay with vLLM's FlashAttention.
"""

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from verl_qerl import upstream
from verl_qerl.kernels.rollout.attention import can_attend, can_read, decode_attention, prepare
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.log import say_once


class DecodeAttentionImpl(FlashAttentionImpl):
    """FlashAttention whose decode steps are one launch, which also writes keys and values into the cache."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values into the cache, unless `forward` will do it."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict) and _decodes(metadata[layer.layer_name], kv_cache):
            return
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; query and output [T, heads, head_size], key and value [T, kv_heads, head_size]."""
        if not _decodes(attn_metadata, kv_cache):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        rows = slice(attn_metadata.num_actual_tokens)
        of_sequences = attn_metadata.seq_lens, attn_metadata.block_table, attn_metadata.slot_mapping
        decode_attention(query[rows], key[rows], value[rows], kv_cache, *of_sequences, self.scale, output[rows])
        return output


def _decodes(metadata: Any, cache: torch.Tensor) -> bool:
    """Whether a step is for `decode_attention`; `metadata` is vLLM's FlashAttentionMetadata, or None."""
    if metadata is None or metadata.max_query_len != 1 or metadata.use_cascade or metadata.causal is not True:
        return False
    rows = metadata.num_actual_tokens
    if rows > min(len(metadata.seq_lens), len(metadata.slot_mapping)):
        return False
    if can_read(cache, metadata.block_table):
        return True
    say_once(f"vLLM's attention decodes: a cache {tuple(cache.shape)} of {cache.dtype}, and the faster one takes none.")
    return False


def why_stock(impl: Any) -> str | None:
    """Why the attention of a layer stays vLLM's; None if it does not."""
    if type(impl) is not FlashAttentionImpl:
        return f"its implementation is {type(impl).__name__}"
    reasons = {
        "ALiBi": impl.alibi_slopes is not None,
        "a sliding window": impl.sliding_window != (-1, -1),
        "a soft cap of logits": bool(impl.logits_soft_cap),
        "attention sinks": impl.sinks is not None,
        f"attention of type {impl.attn_type}": impl.attn_type != AttentionType.DECODER,
        "the cache of another layer": impl.kv_sharing_target_layer_name is not None,
        f"a cache in {impl.kv_cache_dtype}": impl.kv_cache_dtype not in ("auto", "bfloat16"),
        "context parallelism": impl.dcp_world_size > 1,
        f"{impl.num_heads} heads on {impl.num_kv_heads} of {impl.head_size} columns": not can_attend(
            impl.num_heads, impl.num_kv_heads, impl.head_size
        ),
    }
    return next((f"it has {reason}" for reason, holds in reasons.items() if holds), None)


def captures_what_begins(vllm_config: Any) -> bool:
    """Whether CUDA graphs hold steps in which requests begin, captured as if each request had one token.

    vLLM 0.24.0's V2 runner does that with `cudagraph_mode=FULL` (v1/worker/gpu/cudagraph_utils.py, _init_candidates): a
    graph would have `decode_attention` for all that it is replayed with.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    return vllm_config.use_v2_model_runner and mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL


def use_decode_attention(model: torch.nn.Module, vllm_config: Any) -> None:
    """Put the decode steps of a model's attention on our kernel, and compile it.

    Call it after loading and before anything is compiled. Layers that the kernel does not take keep vLLM's attention,
    which is logged once.

    Args:
        vllm_config: The engine's; if its CUDA graphs mix decoding with prompts, all layers keep vLLM's attention.
    """
    if captures_what_begins(vllm_config):
        say_once(
            "vLLM's attention decodes: with cudagraph_mode=FULL its V2 runner captures steps in which requests begin as"
            " if each had one token. FULL_AND_PIECEWISE, vLLM's default, is accepted."
        )
        return
    from vllm.model_executor.layers.attention import Attention

    layers: list[Any] = [module for module in model.modules() if isinstance(module, Attention)]
    found = []
    for layer in layers:
        reason = why_stock(layer.impl)
        if reason:
            say_once(f"vLLM's attention decodes: {reason}, and the faster one takes none such.")
            continue
        found.append(upstream.swap_class(hosts.ATTENTION, layer.impl, DecodeAttentionImpl))
    if found and next(model.parameters()).is_cuda:
        prepare({(impl.head_size, impl.num_queries_per_kv) for impl in found})
