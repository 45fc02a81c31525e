"""A PackedLinear in NVFP4."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_qerl.formats import NVFP4
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4, dequantize_siblings
from verl_qerl.modules.packed_linear import PackedLinear


class NVFP4Linear(PackedLinear):
    """y = x W^T + bias, W in NVFP4 and frozen, gradients for x.

    Attributes:
        weight: [N, K / 2] uint8, the codes.
        weight_scale: [N, K / 16] uint8, the bytes of float8_e4m3fn.
        weight_decode_scale: [4] uint8, the bytes of one float32.
    """

    form = NVFP4()

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`."""
        codes, scale, decode_scale = self.tensors()
        return dequantize_nvfp4(codes, scale, decode_scale.view(torch.float32), dtype)

    @classmethod
    def decode_siblings(cls, linears: Sequence[Any], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """See `PackedLinear.decode_siblings`; on a GPU one launch."""
        parts = (linear.tensors() for linear in linears)
        return dequantize_siblings([(codes, scale, last.view(torch.float32)) for codes, scale, last in parts], dtype)
