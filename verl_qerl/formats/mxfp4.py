"""MXFP4 (OCP Microscaling Formats 1.0): E2M1 codes in blocks of 32 with a power of two as scale; activations in bf16.

    w[n, k] = e2m1(weight_packed)[n, k] * 2 ** (weight_scale[n, k // 32] - 127)

The product is exact in bf16. OCP leaves the choice of the exponent open: here it is the smallest that puts the largest
magnitude of the block below 7, which E2M1 rounds to 6 or less (compressed-tensors and torchao's `even` do the same).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl_qerl.formats.base import PackedWeight, WeightFormat, e2m1_config, power_of_two
from verl_qerl.formats.e2m1 import e2m1_codes, e2m1_values, pack_codes
from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.tensor_spec import TensorSpec

BLOCK_SIZE = 32
BIAS = 127  # of E8M0
MAX_EXPONENT = 125  # 0.5 * 2**-125 and 6 * 2**125 are normal numbers of bf16


@dataclass(frozen=True)
class MXFP4(WeightFormat):
    """`weight_packed` [N, K / 2] uint8, even k in the low nibble, and `weight_scale` [N, K / 32] uint8 (E8M0)."""

    name: str = "mxfp4"
    kind: str = "MXFP4"
    parts: tuple[str, ...] = ("weight_packed", "weight_scale")
    block_size: int = BLOCK_SIZE
    codes_per_byte: int = 2

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        N, K = rows.shape
        blocks = rows.float().reshape(N, K // BLOCK_SIZE, BLOCK_SIZE)
        # amax = mantissa * 2**exponent with a mantissa in [1/2, 1), and 7 = 0.875 * 2**3: scaled by 2**(3 - exponent),
        # a mantissa of 0.875 or more would be 7 or more.
        mantissa, exponent = torch.frexp(blocks.abs().amax(dim=-1))
        exponent = torch.where(mantissa >= 0.875, exponent - 2, exponent - 3)
        exponent = exponent.masked_fill(mantissa == 0, 0).clamp(-MAX_EXPONENT, MAX_EXPONENT)
        codes = e2m1_codes(blocks * power_of_two(-exponent)[..., None])
        return pack_codes(codes.view(N, K)), (exponent + BIAS).to(torch.uint8)

    def dequantize(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """See `WeightFormat.dequantize`."""
        codes, scale = tensors
        values, exponent = e2m1_values(codes), scale.int() - BIAS
        blocks = values.view(*exponent.shape, BLOCK_SIZE) * power_of_two(exponent)[..., None]
        return blocks.view(values.shape).to(dtype)

    def held(self, N: int, K: int) -> tuple[TensorSpec, ...]:
        """See `WeightFormat.held`."""
        return TensorSpec("U8", (N, K // 2)), TensorSpec("U8", (N, K // BLOCK_SIZE))

    def _read(self, where: str, tensors: tuple[torch.Tensor, ...], layout: str) -> PackedWeight:
        weight = PackedWeight(self, tensors)
        if bool(((weight.block_scale.int() - BIAS).abs() > MAX_EXPONENT).any()):
            raise ValueError(f"its exponents are not all within {MAX_EXPONENT} of 0, where bf16 holds the product.")
        return weight

    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """See `WeightFormat.config`."""
        return e2m1_config("mxfp4-pack-quantized", "group", BLOCK_SIZE, "torch.uint8", ignore)
