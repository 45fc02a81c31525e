"""The output head in FP8: weights only, a scale for each token of the vocabulary, activations in bf16 (W8A16).

    w[n, k] = e4m3(codes)[n, k] * scale[n]

At small batches the head is a fifth of what a 7B rollout with packed linears reads for a token. Scales are powers of
two: E4M3 is as fine with them as with any other, and the weight is exact in bf16, so that every kernel multiplies by
the same numbers. The actor keeps its head in bf16, from which the rollout then differs by more than with `bf16`.
"""

import logging
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from verl_qerl import upstream
from verl_qerl.formats.base import check_weight, chunk_rows, power_of_two
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.options import named

logger = logging.getLogger(__name__)

_WHERE = named("lm_head", "fp8")
_LEAST_EXPONENT = -100  # of a token whose weights are zero, as those that pad the vocabulary are


def quantize_head(model: torch.nn.Module) -> None:
    """Put the head of `model` on FP8, now and whenever vLLM reloads it.

    Args:
        model: vLLM's, loaded.

    Raises:
        ValueError: It has no head of its own in bf16, or the GPU no kernel.
    """
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    problem = _problem(model, heads)
    if problem:
        raise ValueError(
            f"the output head cannot be quantized: {_WHERE}, {type(model).__name__}: {problem}. Accepted is a bf16 head"
            " of its own (tie_word_embeddings=false) on a GPU of compute capability 7.5 or more. Leave the option out."
        )
    (head,) = heads
    upstream.set_data(hosts.HEAD, head, quant_method=FP8Head())
    head.quant_method.process_weights_after_loading(head)
    logger.info("verl_qerl: the output head is in FP8")


def _problem(model: torch.nn.Module, heads: list[Any]) -> str | None:
    if len(heads) != 1:
        return f"it has {len(heads)} heads beside its embedding"
    (head,) = heads
    if any(
        module is not head and getattr(module, "weight", None) is head.weight
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
    ):
        return "its head is the embedding"
    if type(head.quant_method) is not UnquantizedEmbeddingMethod:
        return f"its head is quantized already ({type(head.quant_method).__name__})"
    if head.weight.dtype != torch.bfloat16:
        return f"its head is in {head.weight.dtype}"
    if not current_platform.is_cpu() and not current_platform.has_device_capability(75):
        return "the GPU has no kernel for it"
    return None


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a head.

    Args:
        weight: [V, K], finite.

    Returns:
        Codes [V, K] float8_e4m3fn and scales [V, 1] float32: for each row the smallest power of two with which its
        largest magnitude is at most 448.
    """
    chunks = [_quantize_rows(rows) for rows in weight.split(chunk_rows(weight))]
    codes, scale = zip(*chunks, strict=True)
    return torch.cat([chunk.view(torch.uint8) for chunk in codes]).view(torch.float8_e4m3fn), torch.cat(scale)


def _quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.float()
    # amax = mantissa * 2**exponent with a mantissa in [1/2, 1), and 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(rows.abs().amax(dim=1, keepdim=True))
    exponent = torch.where(mantissa > 0.875, exponent - 8, exponent - 9)
    exponent = exponent.masked_fill(mantissa == 0, _LEAST_EXPONENT).clamp(min=_LEAST_EXPONENT)
    return (rows * power_of_two(-exponent)).to(torch.float8_e4m3fn), power_of_two(exponent)


class FP8Head(UnquantizedEmbeddingMethod):
    """Of a ParallelLMHead: Marlin's product with FP8 weights on a GPU, without one that with the decoded weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the bf16 `weight` [V, K] of a head, or of this rank's part of it.

        Raises:
            ValueError: It holds NaN or infinite values.
        """
        check_weight("lm_head", layer.weight.data, "FP8")
        codes, scale = quantize_rows(layer.weight.data)
        if current_platform.is_cpu():
            layer.weight.data.copy_(codes.float() * scale)
            super().process_weights_after_loading(layer)
            return
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import prepare_fp8_layer_for_marlin

        # It asks for the attributes of a linear, and would rearrange a bias that others read.
        linear: Any = torch.nn.Module()
        linear.output_size_per_partition, linear.input_size_per_partition = layer.weight.shape
        linear.orig_dtype = layer.weight.dtype
        linear.weight = torch.nn.Parameter(codes, requires_grad=False)
        linear.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        prepare_fp8_layer_for_marlin(linear, size_k_first=False)
        layer.weight, layer.weight_scale = linear.weight, linear.weight_scale
        layer.workspace = linear.workspace

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., V] of x's dtype."""
        if current_platform.is_cpu():
            return super().apply(layer, x, bias)
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import apply_fp8_marlin_linear

        V, K = layer.num_embeddings_per_partition, layer.embedding_dim
        y = apply_fp8_marlin_linear(x, layer.weight, layer.weight_scale, layer.workspace, V, K, bias=None)
        return y if bias is None else y + bias
