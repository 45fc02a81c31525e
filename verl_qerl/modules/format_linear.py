"""PackedLinear in each format, and which one holds which."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_qerl.formats import FP8, INT8, MXFP4, NVFP4
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4, dequantize_siblings
from verl_qerl.kernels.actor.dequantize_formats import dequantize_format
from verl_qerl.modules.packed_linear import PackedLinear


class FormatLinear(PackedLinear):
    """y = x W^T + bias, W packed and frozen, gradients for x.

    W is decoded to the dtype of x, so rounded once more where the format has a float32 scale (INT8, FP8).
    """

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`."""
        return dequantize_format(self.form, self.held(), dtype)


class FP8Linear(FormatLinear):
    """A linear in FP8: E4M3 codes, a float32 scale a channel."""

    form = FP8()


class INT8Linear(FormatLinear):
    """A linear in INT8, a float32 scale a channel."""

    form = INT8()


class MXFP4Linear(FormatLinear):
    """A linear in MXFP4: two E2M1 codes a byte, an exponent for 32 of them."""

    form = MXFP4()


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


# Name of a format -> module of its linears.
PACKED_LINEARS: dict[str, type[PackedLinear]] = {
    kind.form.name: kind for kind in (FP8Linear, INT8Linear, MXFP4Linear, NVFP4Linear)
}
