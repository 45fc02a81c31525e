"""INT8: symmetric, one scale an output channel (QuRL, arXiv 2602.13953); the rollout quantizes activations per token.

w[n, k] = weight[n, k] * weight_scale[n]        weight in [-127, 127], weight_scale[n] = max_k |w[n, k]| / 127
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_qerl.formats.base import WeightFormat, channel_scale, channel_specs, check_channel_values, w8a8_args
from verl_qerl.nvfp4.checkpoint import compressed_tensors_config
from verl_qerl.nvfp4.ignore import DEFAULT_IGNORE
from verl_qerl.nvfp4.reader import TensorSpec

INT8_MAX = 127.0  # -128 is left out: the grid is symmetric


@dataclass(frozen=True)
class INT8(WeightFormat):
    """`weight` [N, K] int8 and `weight_scale` [N, 1] float32."""

    name: str = "int8"
    kind: str = "INT8"
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
        return channel_specs("I8", N, K)

    def check_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `WeightFormat.check_values`."""
        check_channel_values(tensors)

    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """See `WeightFormat.config`."""
        return compressed_tensors_config("int-quantized", *w8a8_args("int"), ignore)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [M, K] int8, scales [M, 1] float32) of rows [M, K]: channels of a weight, or tokens."""
    scale = channel_scale(rows, INT8_MAX)
    codes = (rows.float() / scale).round()  # ties to even; the largest quotient is 127 but for a rounding
    return codes.to(torch.int8), scale
