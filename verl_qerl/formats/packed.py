"""A weight packed in any of the formats, and its tensors by the names of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from verl_qerl.formats import nvfp4_layout, reference
from verl_qerl.formats.base import WeightFormat
from verl_qerl.formats.nvfp4_weight import Packed, PackedWeight
from verl_qerl.formats.tensor_spec import DTYPES


@dataclass(frozen=True)
class QuantizedWeight(Packed):
    """A weight [N, K] of a format that has no class of its own, as NVFP4 has with PackedWeight.

    Attributes:
        form: The format.
        tensors: One for each of its parts.
    """

    form: WeightFormat
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        """Refuse tensors that are not those of a weight.

        Raises:
            ValueError: One is missing or unknown, of another dtype or shape, or holds what no quantizer writes.
        """
        if set(self.tensors) != set(self.form.parts):
            raise ValueError(
                f"{self.form.kind} holds a weight as {', '.join(self.form.parts)}, not as"
                f" {', '.join(sorted(self.tensors)) or 'nothing'}."
            )
        specs = self.form.specs(*self.shape)
        for part, tensor in self.tensors.items():
            dtype, shape = DTYPES[specs[part].dtype], specs[part].shape
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(
                    f"{part} of {self.form.kind} is {dtype} {shape} for a weight {self.shape}, not {tensor.dtype}"
                    f" {tuple(tensor.shape)}."
                )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) = (out_features, in_features)."""
        codes = self.tensors[self.form.parts[0]]
        if codes.ndim != 2:
            raise ValueError(f"codes of {self.form.kind} are a matrix, not {tuple(codes.shape)}.")
        return codes.shape[0], codes.shape[1] * self.form.codes_per_byte

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def digested(self) -> tuple[str, tuple[torch.Tensor, ...]]:
        """Format and shape; the tensors in the order of the format's parts."""
        return f"{self.form.name} {self.shape!r}", tuple(self.tensors[part] for part in self.form.parts)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same weight on `device`."""
        return QuantizedWeight(self.form, {part: tensor.to(device) for part, tensor in self.tensors.items()})


def packed_from(form: WeightFormat, tensors: Mapping[str, torch.Tensor]) -> Packed:
    """What `WeightFormat.quantize` gave, as a packed weight."""
    if form.name == "nvfp4":
        return nvfp4_layout.from_tensors("weight", dict(tensors), "compressed-tensors")
    return QuantizedWeight(form, tensors)


def named_tensors(module: str, weight: Packed, layout: str = "compressed-tensors") -> dict[str, torch.Tensor]:
    """`<module>.<part>` -> tensor, as a checkpoint holds a packed weight; `layout` is a choice of NVFP4."""
    if isinstance(weight, QuantizedWeight):
        return {f"{module}.{part}": weight.tensors[part] for part in weight.form.parts}
    assert isinstance(weight, PackedWeight)
    return nvfp4_layout.to_tensors(module, weight, layout)


def dequantize(weight: Packed, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight [N, K] of `dtype`; see `WeightFormat.dequantize`."""
    if isinstance(weight, QuantizedWeight):
        return weight.form.dequantize(weight.tensors, dtype)
    assert isinstance(weight, PackedWeight)
    return reference.dequantize(weight, dtype)


def relative_error(weight: torch.Tensor, packed: Packed) -> float:
    """||dequantized - weight|| / ||weight||, Frobenius norms; 0 for a zero weight."""
    if isinstance(packed, PackedWeight):
        return reference.relative_error(weight, packed)
    assert isinstance(packed, QuantizedWeight)
    rows = reference.chunk_rows(weight)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for i in range(0, weight.shape[0], rows):
        original = weight[i : i + rows].double()
        part = {name: tensor[i : i + rows] for name, tensor in packed.tensors.items()}
        error = packed.form.dequantize(part, torch.float32).double() - original
        squares += torch.stack([x.square().sum() for x in (error, original)])
    error, norm = squares.sqrt().tolist()
    return error / norm if norm > 0 else 0.0
