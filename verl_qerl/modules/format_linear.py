"""PackedLinear in the neighbours of NVFP4."""

from collections.abc import Mapping

import torch

from verl_qerl.formats import FP8, INT8, MXFP4, WeightFormat
from verl_qerl.formats.nvfp4_weight import Packed
from verl_qerl.formats.packed import QuantizedWeight
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec
from verl_qerl.kernels.actor.dequantize_formats import dequantize_format
from verl_qerl.kernels.actor.linear import frozen_linear
from verl_qerl.modules.nvfp4_linear import NVFP4Linear
from verl_qerl.modules.packed_linear import PackedLinear


class FormatLinear(PackedLinear):
    """y = x W^T + bias, W in `form` and frozen, gradients for x.

    W is decoded to the dtype of x, so rounded once more where the format has a float32 scale (INT8, FP8).

    Attributes:
        form: The format.
        weight: [N, K / codes per byte] uint8, the bytes of the format's first part.
        weight_scale: [N, ...] uint8, the bytes of its second part.
    """

    form: WeightFormat
    weight_scale: torch.Tensor

    @classmethod
    def byte_shapes(cls, N: int, K: int) -> dict[str, tuple[int, ...]]:
        """See `PackedLinear.byte_shapes`."""
        shapes = (_byte_shape(spec) for spec in cls.form.specs(N, K).values())
        return dict(zip(("weight", "weight_scale"), shapes, strict=True))

    def fill(self, packed: Packed) -> None:
        """Take over the tensors of `packed` (no copy; its device becomes the module's).

        Raises:
            ValueError: The shapes or formats differ.
        """
        if not isinstance(packed, QuantizedWeight) or packed.form != self.form:
            raise ValueError(
                f"the packed weight is in another format than the linear, {self.form.name}. Both must be the same."
                " Check +rollout=... and model.path."
            )
        self.check_shape(packed)
        self.weight, self.weight_scale = (packed.tensors[part].view(torch.uint8) for part in self.form.parts)

    def packed(self) -> QuantizedWeight:
        """The weight as a QuantizedWeight over the module's own storage."""
        return QuantizedWeight(self.form, self._parts())

    def decode_packed(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`, from the packed tensors."""
        return dequantize_format(self.form, self._parts(), dtype)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """X W^T + bias, [..., N] of x's dtype, from the packed tensors."""
        return frozen_linear(x, self.decode, bias)

    def _parts(self) -> Mapping[str, torch.Tensor]:
        specs = self.form.specs(self.out_features, self.in_features)
        held = zip(specs.items(), (self.weight, self.weight_scale), strict=True)
        return {part: data.view(DTYPES[spec.dtype]) for (part, spec), data in held}


def _byte_shape(spec: TensorSpec) -> tuple[int, ...]:
    return (*spec.shape[:-1], spec.shape[-1] * DTYPES[spec.dtype].itemsize)


class FP8Linear(FormatLinear):
    """In FP8: E4M3 codes, a float32 scale a channel."""

    form = FP8()
    kind = form.kind


class INT8Linear(FormatLinear):
    """In INT8: codes, a float32 scale a channel."""

    form = INT8()
    kind = form.kind


class MXFP4Linear(FormatLinear):
    """In MXFP4: two E2M1 codes a byte, an exponent for 32 of them."""

    form = MXFP4()
    kind = form.kind
    block_size = form.block_size


# Name of a format -> module of its linears.
PACKED_LINEARS: dict[str, type[PackedLinear]] = {
    "fp8": FP8Linear,
    "int8": INT8Linear,
    "mxfp4": MXFP4Linear,
    "nvfp4": NVFP4Linear,
}
