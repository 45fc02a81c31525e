"""E2M1, the numbers of four bits that MXFP4 and NVFP4 have for codes: rounding to them, packing and decoding.

Every step is an elementwise IEEE operation, so that a CPU and a GPU give the same bits.
"""

import torch

E2M1_MAX = 6.0
# Index = 4-bit code, bit 3 = sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT = 0x7F800000  # of a float32
_ROUNDER = 1.5 * 2**22  # a float32 of [2**22, 2**23) has a step of 1 / 2


def to_e2m1(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The nearest of E2M1's values to those of `x` >= 0, ties to even; beyond 6 it is 6."""
    # Adding and subtracting a number whose step is that of E2M1 around x, 0.5 below 2 and 1 and 2 above, rounds.
    rounder = x.clamp(1.0, 4.0)
    rounder.view(torch.int32).bitwise_and_(_EXPONENT)  # 1, 2 or 4
    rounder *= _ROUNDER
    return torch.add(x, rounder, out=out).sub_(rounder).clamp_(max=E2M1_MAX)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 codes (uint8, one a value, bit 3 = sign), ties to even; magnitudes above 6 become 6."""
    # As in `to_e2m1`; the last bits of the sum count steps of 0.5, 1 or 2, where codes count from 0, 2 or 4 on.
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    rounder = magnitude.clamp(min=1.0)
    exponent = rounder.view(torch.int32).bitwise_and_(_EXPONENT) >> 22  # twice that of float32: 254, 256 or 258
    magnitude += rounder.mul_(_ROUNDER)
    codes = magnitude.view(torch.int32).bitwise_and_(7).add_(exponent).sub_(254)
    return codes.bitwise_or_((x.view(torch.int32) >> 28).bitwise_and_(8)).to(torch.uint8)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes as [N, K / 2] bytes, even k in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 values of [N, K / 2] bytes; the inverse of `pack_codes` of `e2m1_codes`."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]
