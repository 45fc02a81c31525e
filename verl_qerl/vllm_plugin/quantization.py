"""The quantization method `verl_qerl_nvfp4`: compressed-tensors' W4A16 NVFP4 with our choice of kernel.

On Hopper that is `linear.TiledKernel`, on other GPUs vLLM's own (Marlin). Without a GPU, vLLM has no kernel at all; the
reference below decodes the weight once, so that the same loader, LoRA layers and noise run on a laptop.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4
from vllm.platforms import current_platform

from verl_qerl.nvfp4.format import PackedWeight
from verl_qerl.nvfp4.reference import dequantize
from verl_qerl.vllm_plugin import NAME
from verl_qerl.vllm_plugin.options import rollout_options

logger = init_logger(__name__)


class NVFP4Config(CompressedTensorsConfig):
    """compressed-tensors' configuration under our name; every linear not in `ignore` is NVFP4."""

    def get_name(self) -> Any:
        """`verl_qerl_nvfp4`."""
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Take a compressed-tensors checkpoint when the user asked for us by name."""
        return NAME if user_quant == NAME else None

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_nvfp4_format(weight_quant) and input_quant is None:
            return W4A16NVFP4()
        return super()._get_scheme_from_parts(weight_quant, input_quant, *args, **kwargs)


class W4A16NVFP4(CompressedTensorsW4A4Fp4):
    """Weight-only NVFP4: packed weights, activations in bf16."""

    def __init__(self) -> None:
        if not current_platform.is_cpu():
            super().__init__(use_a16=True)
            self._choose_by_rows()
            return
        # vLLM's own __init__ raises on a CPU: it forces Marlin. The rest of it is these three attributes.
        self.use_a16 = True
        self.kernel = ReferenceKernel(NvFp4LinearLayerConfig())
        self.group_size = 16

    def _choose_by_rows(self) -> None:
        # Not at the top: it needs vLLM's CUDA kernels, which the CPU build lacks.
        from verl_qerl.vllm_plugin.linear import TiledKernel
        from verl_qerl.vllm_plugin.plans import why_not

        options = rollout_options(get_current_vllm_config_or_none())
        if options.linear == "stock":
            return
        reason = why_not()
        if reason:
            logger.warning_once("NVFP4 linears run on Marlin, which is slow for large batches: %s.", reason)
            return
        self.kernel = TiledKernel(NvFp4LinearLayerConfig(), resident=options.resident)


class ReferenceKernel(NvFp4LinearKernel):
    """Decodes the whole weight after loading and multiplies densely: exact, and as large as bf16."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere."""
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Every NVFP4 layer."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weight [N, K / 2] by the dense one [N, K] of the layer's dtype."""
        packed = PackedWeight(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        dense = dequantize(packed, layer.params_dtype)
        layer.weight = torch.nn.Parameter(dense, requires_grad=False)
        del layer.weight_scale, layer.weight_global_scale

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., N]."""
        return torch.nn.functional.linear(x, layer.weight, bias)
