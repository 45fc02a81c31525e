"""Linears for a machine without a GPU, where vLLM has no kernel for a format: exact, dense and slow.

The same loader, reload, LoRA layers and noise run with them on a laptop. INT8 needs one only where vLLM's own kernel
for CPUs computes something else (`onednn_multiplies_int8`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.parameter import ChannelQuantScaleParameter

from verl_qerl.formats import FP8, INT8, MXFP4, NVFP4, WeightFormat
from verl_qerl.formats.channel import ChannelFormat
from verl_qerl.vllm_plugin.weights.linear import Everywhere, frozen


class _Dense(Everywhere):
    """Decodes the whole weight after loading and multiplies densely: exact, and as large as bf16."""

    form: WeightFormat
    scales: tuple[str, ...]  # vLLM's names, in the order of `PackedWeight.tensors`

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weight [N, K / 2] by the dense one [N, K] of the layer's dtype."""
        tensors = [getattr(layer, name).data for name in ("weight", *self.scales)]
        layer.weight = frozen(self.form.dequantize(tensors, layer.params_dtype))
        for name in self.scales:
            delattr(layer, name)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., N]."""
        return torch.nn.functional.linear(x, layer.weight, bias)


class ReferenceKernel(_Dense, NvFp4LinearKernel):
    """A dense linear in the place of an NVFP4 one."""

    form, scales = NVFP4(), ("weight_scale", "weight_global_scale")


class MXFP4ReferenceKernel(_Dense, MxFp4LinearKernel):
    """A dense linear in the place of an MXFP4 one."""

    form, scales = MXFP4(), ("weight_scale",)


class _W8A8:
    """Weights per channel and activations per token, with sums in float32."""

    form: ChannelFormat

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the codes as float32, exactly."""
        layer.weight = frozen(layer.weight.data.float())
        layer.weight_scale = frozen(layer.weight_scale.data)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., N] of x's dtype."""
        codes, scale = self.form.quantize_rows(x.reshape(-1, x.shape[-1]))
        y = codes.float() @ layer.weight.t() * (scale * layer.weight_scale.t())
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias


class W8A8FP8Reference(_W8A8, CompressedTensorsScheme):
    """FP8 weights per channel and activations per token, as vLLM's GPU kernels compute, with sums in float32."""

    form = FP8()

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is needed."""
        return 0

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Callable,
        **kwargs: Any,
    ) -> None:
        """`weight` [N, K] float8_e4m3fn and `weight_scale` [N, 1] float32."""
        sizes, K = output_partition_sizes, input_size_per_partition
        layer.logical_widths = sizes
        layer.register_parameter("weight", create_fp8_weight_parameter(sum(sizes), K, weight_loader))
        scale = create_fp8_scale_parameter(ChannelQuantScaleParameter, sizes, K, None, weight_loader)  # type: ignore
        layer.register_parameter("weight_scale", scale)


class INT8ReferenceKernel(Everywhere, _W8A8, Int8ScaledMMLinearKernel):
    """INT8 weights per channel and activations per token, with sums in float32."""

    form = INT8()


@functools.cache
def onednn_multiplies_int8() -> bool:
    """Whether vLLM's INT8 kernel for CPUs gives the sum of the products here.

    Without VNNI oneDNN (of vLLM 0.27) adds pairs of products in 16 bits, which saturate.
    """
    K, N = 64, 32
    largest, scales = torch.full((N, K), 127, dtype=torch.int8), torch.ones(N, 1, dtype=torch.float32)
    # `scales` has to live as long as the handler, which reads them where they are.
    handler = ops.create_onednn_scaled_mm(largest.t(), scales, torch.float32, True, False, 1)
    found = torch.empty(1, N, dtype=torch.float32)
    ops.onednn_scaled_mm(handler, largest[:1], found, scales[:1], None, None, None)
    return bool((found == K * 127.0**2).all())
