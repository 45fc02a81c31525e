"""Eight bits a weight with one scale an output channel (QuRL, arXiv 2602.13953); activations quantized per token.

w[n, k] = weight[n, k] * weight_scale[n]        weight_scale[n] = max_k |w[n, k]| / the largest code
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_qerl.formats.base import PackedWeight, WeightFormat, compressed_tensors_config
from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448.0


@dataclass(frozen=True)
class ChannelFormat(WeightFormat):
    """`weight` [N, K] of codes and `weight_scale` [N, 1] float32.

    Attributes:
        codes: dtype of the codes, as safetensors spells it.
        number: What a code is, as compressed-tensors spells it: `int` or `float`.
    """

    parts: tuple[str, ...] = ("weight", "weight_scale")
    quantizes_activations: bool = True
    codes: ClassVar[str]
    number: ClassVar[str]
    largest: ClassVar[float]

    def quantize_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes [M, K], scales [M, 1] float32) of rows [M, K]: channels of a weight, or tokens.

        A scale puts the largest magnitude of its row on `largest`. It is at least the smallest normal number, so that a
        row of zeros has one too.
        """
        amax = rows.abs().amax(dim=1, keepdim=True).float()
        # By a tensor on the device: CUDA turns a division by a number into a product with its reciprocal.
        scale = (amax / amax.new_tensor(self.largest)).clamp(min=torch.finfo(torch.float32).tiny)
        quotients, dtype = rows.float() / scale, DTYPES[self.codes]
        # FP8 has no infinity: above 464 would be NaN. INT8's ties go to even.
        return (quotients if dtype.is_floating_point else quotients.round()).to(dtype), scale

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.quantize_rows(rows)

    def dequantize(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """See `WeightFormat.dequantize`."""
        codes, scale = tensors
        return (codes.float() * scale).to(dtype)

    def held(self, N: int, K: int) -> tuple[TensorSpec, ...]:
        """See `WeightFormat.held`."""
        return TensorSpec(self.codes, (N, K)), TensorSpec("F32", (N, 1))

    def _read(self, where: str, tensors: tuple[torch.Tensor, ...], layout: str) -> PackedWeight:
        codes, scale = tensors
        # Other tools write scales in bf16; kernels read float32.
        weight = PackedWeight(self, (codes, scale.float() if scale.is_floating_point() else scale))
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ValueError("its scales are not all positive numbers.")
        if codes.is_floating_point() and bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):  # NaN
            raise ValueError("its codes are not all numbers.")
        return weight

    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """See `WeightFormat.config`."""
        common = {"num_bits": 8, "type": self.number, "symmetric": True}
        weights = {**common, "strategy": "channel", "dynamic": False, "observer": "minmax"}
        activations = {**common, "strategy": "token", "dynamic": True, "observer": None}
        return compressed_tensors_config(f"{self.number}-quantized", weights, activations, ignore)


@dataclass(frozen=True)
class FP8(ChannelFormat):
    """`weight` [N, K] float8_e4m3fn, at most 448 in magnitude, and `weight_scale` [N, 1] float32."""

    name: str = "fp8"
    kind: str = "FP8"
    codes: ClassVar[str] = "F8_E4M3"
    number: ClassVar[str] = "float"
    largest: ClassVar[float] = E4M3_MAX


@dataclass(frozen=True)
class INT8(ChannelFormat):
    """`weight` [N, K] int8, in [-127, 127], and `weight_scale` [N, 1] float32."""

    name: str = "int8"
    kind: str = "INT8"
    codes: ClassVar[str] = "I8"
    number: ClassVar[str] = "int"
    largest: ClassVar[float] = 127.0  # -128 is left out: the grid is symmetric
