"""NVFP4: two codes a byte, a scale for each block of 16, one for each group of fused linears (nvfp4_weight.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_qerl.formats import nvfp4_layout, reference
from verl_qerl.formats.base import WeightFormat
from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.nvfp4_layout import nvfp4_specs
from verl_qerl.formats.nvfp4_weight import BLOCK_SIZE, PackedWeight
from verl_qerl.formats.tensor_spec import TensorSpec


@dataclass(frozen=True)
class NVFP4(WeightFormat):
    """The tensors of compressed-tensors `nvfp4-pack-quantized`; see `formats.nvfp4_layout`.

    Attributes:
        scale: Scale choice of `formats.reference.quantize_group`.
    """

    name: str = "nvfp4"
    kind: str = "NVFP4"
    parts: tuple[str, ...] = (nvfp4_layout.CODES, nvfp4_layout.BLOCK_SCALE, nvfp4_layout.GLOBAL_SCALE)
    block_size: int = BLOCK_SIZE
    codes_per_byte: int = 2
    shares_scale: bool = True
    scale: str = reference.DEFAULT_SCALE

    def quantize_group(self, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """See `WeightFormat.quantize_group`; the members share their global scale."""
        packed = reference.quantize_group(dict(weights), self.scale)
        return {name: self._named(weight) for name, weight in packed.items()}

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._named(reference.quantize(weight, self.scale))

    def _named(self, packed: PackedWeight) -> dict[str, torch.Tensor]:
        named = nvfp4_layout.to_tensors("", packed)
        return {name.removeprefix("."): tensor for name, tensor in named.items()}

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """See `WeightFormat.dequantize`."""
        return reference.dequantize(nvfp4_layout.from_tensors("weight", dict(tensors), "compressed-tensors"), dtype)

    def specs(self, N: int, K: int) -> dict[str, TensorSpec]:
        """See `WeightFormat.specs`."""
        return nvfp4_specs(N, K)

    def check_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `WeightFormat.check_values`."""
        nvfp4_layout.from_tensors("weight", dict(tensors), "compressed-tensors")

    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """See `WeightFormat.config`."""
        return nvfp4_layout.quantization_config(ignore)
