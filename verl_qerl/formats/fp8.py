"""FP8 E4M3: one scale an output channel (QuRL, arXiv 2602.13953); the rollout quantizes activations per token.

w[n, k] = weight[n, k] * weight_scale[n]        |weight| <= 448, weight_scale[n] = max_k |w[n, k]| / 448
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_qerl.formats.base import WeightFormat, channel_scale, channel_specs, check_channel_values, w8a8_args
from verl_qerl.nvfp4.checkpoint import compressed_tensors_config
from verl_qerl.nvfp4.format import E4M3_MAX
from verl_qerl.nvfp4.ignore import DEFAULT_IGNORE
from verl_qerl.nvfp4.reader import TensorSpec


@dataclass(frozen=True)
class FP8(WeightFormat):
    """`weight` [N, K] float8_e4m3fn and `weight_scale` [N, 1] float32."""

    name: str = "fp8"
    kind: str = "FP8"
    parts: tuple[str, ...] = ("weight", "weight_scale")
    quantizes_activations: bool = True

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = quantize_rows(weight)
        return {"weight": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """See `WeightFormat.dequantize`."""
        return (tensors["weight"].float() * tensors["weight_scale"]).to(dtype)

    def specs(self, N: int, K: int) -> dict[str, TensorSpec]:
        """See `WeightFormat.specs`."""
        return channel_specs("F8_E4M3", N, K)

    def check_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `WeightFormat.check_values`."""
        check_channel_values(tensors)

    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """See `WeightFormat.config`."""
        return compressed_tensors_config("float-quantized", *w8a8_args("float"), ignore)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [M, K] float8_e4m3fn, scales [M, 1] float32) of rows [M, K]: channels of a weight, or tokens."""
    scale = channel_scale(rows, E4M3_MAX)
    # E4M3 has no infinity: above 464 would be NaN. The largest quotient is 448 but for a rounding of float32.
    return (rows.float() / scale).to(torch.float8_e4m3fn), scale
