"""What a weight format is: tensors of a compressed-tensors checkpoint, and the arithmetic between them and a weight."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.reference import check_in_features, check_weight, chunk_rows
from verl_qerl.formats.tensor_spec import TensorSpec


@dataclass(frozen=True)
class WeightFormat(ABC):
    """One way to hold the weight [N, K] of a linear.

    Attributes:
        name: As in `+rollout=<name>`.
        kind: For messages.
        parts: Names of the tensors a weight becomes, as checkpoints have them behind `<module>.`; the codes first.
        codes_per_byte: Codes in a byte of the first part.
        block_size: K must be a multiple of it.
        quantizes_activations: Whether the rollout multiplies by quantized activations (W8A8); else they stay in bf16.
        shares_scale: Whether linears that vLLM fuses (q, k, v; gate, up) must be quantized together.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    block_size: int = 1
    codes_per_byte: int = 1
    quantizes_activations: bool = False
    shares_scale: bool = False

    def quantize(self, weight: torch.Tensor, name: str = "weight") -> dict[str, torch.Tensor]:
        """Quantize one weight.

        Args:
            weight: [N, K], floating point, finite.
            name: For messages.

        Returns:
            One tensor for each of `parts`, on the weight's device; the same bits on every device.

        Raises:
            ValueError: No matrix of floats, NaN or infinite values, or a K that the blocks do not divide.
        """
        return self.quantize_group({name: weight})[name]

    def quantize_group(self, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Quantize the linears of a group that vLLM fuses; see `quantize`.

        Args:
            weights: name -> weight, of every member where `shares_scale`.
        """
        for name, weight in weights.items():
            check_weight(name, weight, self.kind)
            check_in_features(name, weight.shape[1], self.block_size, self.kind)
        return {name: self._quantize_in_chunks(weight) for name, weight in weights.items()}

    def _quantize_in_chunks(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        chunks = [self._quantize(rows) for rows in weight.split(chunk_rows(weight))]
        return {part: torch.cat([chunk[part] for chunk in chunks]) for part in self.parts}

    @abstractmethod
    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`quantize` of a weight that is known to fit, or of some of its rows."""

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight [N, K] that the tensors stand for: a product in float32, rounded once to `dtype`."""

    @abstractmethod
    def specs(self, N: int, K: int) -> dict[str, TensorSpec]:
        """Part -> dtype and shape, of a weight [N, K]."""

    @abstractmethod
    def check_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse tensors of `specs` with values that no quantizer writes.

        Raises:
            ValueError: There are some.
        """

    @abstractmethod
    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """The `quantization_config` of config.json, as vLLM and transformers read it.

        Args:
            ignore: Modules left in bf16: exact names, or `re:` and a regular expression.
        """


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** exponent in float32, by its bits: torch.ldexp goes through pow, which need not be exact on a GPU."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
