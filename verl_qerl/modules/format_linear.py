"""PackedLinear in each format, and which one holds which."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_qerl.formats import FP8, INT8, MXFP4, NVFP4
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4, dequantize_siblings
from verl_qerl.modules.packed_linear import PackedLinear


class FP8Linear(PackedLinear):
    """A linear in FP8: E4M3 codes, a float32 scale a channel."""

    form = FP8()


class INT8Linear(PackedLinear):
    """A linear in INT8, a float32 scale a channel."""

    form = INT8()


class MXFP4Linear(PackedLinear):
    """A linear in MXFP4: two E2M1 codes a byte, an exponent for 32 of them."""

    form = MXFP4()


class NVFP4Linear(PackedLinear):
    """A linear in NVFP4: two E2M1 codes a byte, an E4M3 scale for 16 of them, and a float32 scale."""

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
