"""Linears for a machine without a GPU, where vLLM has no kernel for most formats: exact, dense and slow.

The same loader, reload, LoRA layers and noise run with them on a laptop. vLLM's INT8 kernel for CPUs is not used: it
packs weights such that they cannot be reloaded or adapted, and without VNNI its products are wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from verl_qerl.formats import MXFP4, NVFP4, WeightFormat, get_format
from verl_qerl.formats.tensor_spec import DTYPES
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


class W8A8Reference(CompressedTensorsScheme):
    """FP8 or INT8 weights per channel and activations per token, as vLLM's GPU kernels compute, with float32 sums."""

    def __init__(self, form: str) -> None:
        self.form: Any = get_format(form)

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
        """`weight` [N, K] of codes and `weight_scale` [N, 1] float32."""
        layer.logical_widths = output_partition_sizes
        codes, scale = (
            torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
            for spec in self.form.held(sum(output_partition_sizes), input_size_per_partition)
        )
        weight = ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", weight)
        scales = ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight_scale", scales)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the codes as float32, exactly."""
        layer.weight = frozen(layer.weight.data.float())
        layer.weight_scale = frozen(layer.weight_scale.data)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., N] of x's dtype."""
        codes, scale = self.form.quantize_rows(x.reshape(-1, x.shape[-1]))
        y = codes.float() @ layer.weight.t() * (scale * layer.weight_scale.t())
        y = y.to(x.dtype).view(*x.shape[:-1], y.shape[1])
        return y if bias is None else y + bias
