"""PackedLinear in INT8, FP8 and MXFP4, and which one holds which format."""

import torch

from verl_qerl.formats import FP8, INT8, MXFP4
from verl_qerl.kernels.actor.dequantize_formats import dequantize_format
from verl_qerl.modules.nvfp4_linear import NVFP4Linear
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


# Name of a format -> module of its linears.
PACKED_LINEARS: dict[str, type[PackedLinear]] = {
    kind.form.name: kind for kind in (FP8Linear, INT8Linear, MXFP4Linear, NVFP4Linear)
}
