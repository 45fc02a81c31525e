"""What a weight format is, and a weight that is packed in one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

# Bounds temporaries: to a few hundred MB on a GPU, and to what a core's caches keep on a CPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}


@dataclass(frozen=True)
class PackedWeight:
    """One weight [N, K] in a format.

    Attributes:
        tensors: One for each of its parts, as `WeightFormat.held` describes them.
    """

    form: "WeightFormat"
    tensors: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2:
            raise ValueError(f"codes of {self.form.kind} are a matrix, not {tuple(self.codes.shape)}.")
        for part, spec, tensor in zip(self.form.parts, self.form.held(*self.shape), self.tensors, strict=True):
            dtype, shape = DTYPES[spec.dtype], spec.shape
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(
                    f"{part} of {self.form.kind} is {dtype} {shape} for a weight {self.shape}, not {tensor.dtype}"
                    f" {tuple(tensor.shape)}."
                )

    @property
    def codes(self) -> torch.Tensor:
        """The first tensor: [N, K / codes in a byte]."""
        return self.tensors[0]

    @property
    def block_scale(self) -> torch.Tensor:
        """The second tensor: a scale for each block of a row, [N, K / block size], or for each row, [N, 1]."""
        return self.tensors[1]

    @property
    def global_decode_scale(self) -> torch.Tensor:
        """The third tensor, [] float32; NVFP4 alone has one."""
        return self.tensors[2]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) = (out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1] * self.form.codes_per_byte

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on `device`."""
        return PackedWeight(self.form, tuple(tensor.to(device) for tensor in self.tensors))


@dataclass(frozen=True)
class WeightFormat(ABC):
    """One way to hold the weight [N, K] of a linear.

    Attributes:
        name: The name in `+rollout=<name>`.
        kind: For messages.
        parts: Names of the tensors a weight becomes, as compressed-tensors has them behind `<module>.`; codes first.
        block_size: K must be a multiple of it.
        codes_per_byte: Codes in a byte of the first part.
        quantizes_activations: Whether the rollout multiplies by quantized activations (W8A8); else they stay in bf16.
        shares_scale: Whether linears that vLLM fuses (q, k, v; gate, up) must be quantized together.
        holds_experts: Whether the experts of a mixture can be held, by the actor and by vLLM.
        scale: How scales are chosen, one of `scale_choices`, whose first is the default.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    block_size: int = 1
    codes_per_byte: int = 1
    quantizes_activations: bool = False
    shares_scale: bool = False
    holds_experts: bool = False
    scale: str = "minmax"
    scale_choices: ClassVar[tuple[str, ...]] = ("minmax",)

    def __post_init__(self) -> None:
        if self.scale not in self.scale_choices:
            raise ValueError(
                f"unknown scale choice: scale={self.scale!r} of {self.name}. Accepted are"
                f" {', '.join(self.scale_choices)}. Choose one of them."
            )

    @property
    def layouts(self) -> Mapping[str, tuple[str, ...]]:
        """Layout of a checkpoint -> what `parts` are called there."""
        return {"compressed-tensors": self.parts}

    def quantize(self, weight: torch.Tensor, name: str = "weight") -> PackedWeight:
        """Quantize one weight.

        Args:
            weight: [N, K], floating point, finite.

        Returns:
            The weight, packed, on its device; the same bits on every device.

        Raises:
            ValueError: No matrix of floats, NaN or infinite values, or a K that the blocks do not divide.
        """
        return self.quantize_group({name: weight})[name]

    def quantize_group(self, weights: Mapping[str, torch.Tensor]) -> dict[str, PackedWeight]:
        """Quantize the linears of a group that vLLM fuses; see `quantize`.

        Args:
            weights: name -> weight, of every member where `shares_scale`.
        """
        for name, weight in weights.items():
            self._check_weight(name, weight)
            self.check_in_features(name, weight.shape[1])
        return self._quantize_group(weights)

    def check_in_features(self, name: str, in_features: int) -> None:
        """Refuse with a ValueError in_features that the blocks do not divide."""
        if in_features % self.block_size:
            _, _, kind = name.rpartition(".")
            raise ValueError(
                f"in_features={in_features} of {name!r} is not a multiple of {self.block_size}."
                f" {self.kind} cannot hold this weight. Add 're:.*{kind}$' to `ignore`, for all layers."
            )

    def _check_weight(self, name: str, weight: torch.Tensor) -> None:
        """Require a finite matrix of floats of 16 bits or more: narrower ones are the codes of a quantized weight."""
        if weight.ndim != 2 or not weight.numel() or not weight.is_floating_point() or weight.element_size() < 2:
            raise ValueError(
                f"{name!r} is {weight.dtype} with shape {tuple(weight.shape)}. {self.kind} holds float matrices, of 16"
                " bits or more a number. Name the original bf16 model."
            )
        bad = weight.numel() - int(torch.isfinite(weight).sum())
        if bad:
            raise ValueError(
                f"{name!r} holds {bad} NaN or infinite values. {self.kind} holds finite weights only."
                " Repair the checkpoint and quantize again."
            )

    def _quantize_group(self, weights: Mapping[str, torch.Tensor]) -> dict[str, PackedWeight]:
        return {name: PackedWeight(self, in_chunks(weight, self._quantize)) for name, weight in weights.items()}

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of some rows of a weight that is known to fit."""
        raise NotImplementedError

    @abstractmethod
    def dequantize(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight [N, K] that `PackedWeight.tensors` stand for: a product in float32, rounded once to `dtype`."""

    @abstractmethod
    def held(self, N: int, K: int) -> tuple[TensorSpec, ...]:
        """Dtype and shape of `PackedWeight.tensors`, of a weight [N, K]."""

    def specs(self, N: int, K: int, layout: str = "compressed-tensors") -> dict[str, TensorSpec]:
        """Name -> dtype and shape of the tensors that a weight [N, K] becomes in a checkpoint, without its module."""
        return dict(zip(self.layouts[layout], self.held(N, K), strict=True))

    def to_tensors(self, weight: PackedWeight, layout: str = "compressed-tensors") -> dict[str, torch.Tensor]:
        """The tensors of `specs`, of a weight."""
        return dict(zip(self.layouts[layout], weight.tensors, strict=True))

    def from_tensors(
        self, where: str, tensors: Mapping[str, torch.Tensor], layout: str = "compressed-tensors"
    ) -> PackedWeight:
        """The inverse of `to_tensors`.

        Args:
            tensors: The tensors of one weight, by their names without the module.

        Raises:
            CheckpointFormatError: A tensor is missing or unknown, of another dtype or shape, or holds what no
                quantizer writes.
        """
        names = self.layouts[layout]
        missing, unknown = sorted(set(names) - set(tensors)), sorted(set(tensors) - set(names))
        if missing:
            raise CheckpointFormatError(f"{where} lacks {missing}. Download or quantize the model again.")
        if unknown:
            raise CheckpointFormatError(
                f"{where} has {unknown} beside what a weight in {self.kind} is made of, and they may change it."
                f" Accepted are {', '.join(names)}. Quantize the original model with `python -m verl_qerl quantize`."
            )
        try:
            return self._read(where, tuple(tensors[name] for name in names), layout)
        except ValueError as error:
            raise CheckpointFormatError(
                f"{where} is no weight in {self.kind}: {error} What `python -m verl_qerl quantize --format {self.name}`"
                " writes is accepted. Download or quantize the model again."
            ) from error

    @abstractmethod
    def _read(self, where: str, tensors: tuple[torch.Tensor, ...], layout: str) -> PackedWeight:
        """`from_tensors` of all parts, in their order.

        Raises:
            ValueError: They do not fit together, or hold what no quantizer writes.
        """

    def with_shared_scale(self, weights: dict[str, PackedWeight]) -> dict[str, PackedWeight]:
        """Weights of a group that vLLM fuses, read from a checkpoint, as they are where one kernel multiplies by them.

        Raises:
            CheckpointFormatError: They must share a scale and cannot.
        """
        return weights

    def is_exact(self, weight: PackedWeight) -> bool:
        """Whether bf16 holds the decoded weight as every kernel of the rollout computes with it."""
        return True

    def digest_label(self, shape: tuple[int, int]) -> str:
        """What a digest of a weight [N, K] begins with."""
        return f"{self.name} {shape!r}"

    @abstractmethod
    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """The `quantization_config` of config.json, as vLLM and transformers read it.

        Args:
            ignore: Modules left in bf16: exact names, or `re:` and a regular expression.
        """


def named_tensors(module: str, weight: PackedWeight, layout: str = "compressed-tensors") -> dict[str, torch.Tensor]:
    """`<module>.<part>` -> tensor, as a checkpoint holds a packed weight."""
    return {f"{module}.{part}": tensor for part, tensor in weight.form.to_tensors(weight, layout).items()}


def compressed_tensors_config(
    layout: str, weights: dict, input_activations: dict | None, ignore: Sequence[str]
) -> dict:
    """A `quantization_config` with one group of all linears that `ignore` does not name.

    Args:
        layout: compressed-tensors' name of the format, e.g. `int-quantized`.
        weights: compressed-tensors' QuantizationArgs.
        input_activations: The same, or None where activations stay as they are.
        ignore: See `WeightFormat.config`.
    """
    group = {
        "targets": ["Linear"],
        "format": layout,
        "weights": weights,
        "input_activations": input_activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


def e2m1_config(layout: str, strategy: str, group_size: int, scale_dtype: str, ignore: Sequence[str]) -> dict:
    """`compressed_tensors_config` of E2M1 codes in blocks of `group_size`, under activations that are not quantized."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": strategy,
        "group_size": group_size,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": scale_dtype,
    }
    return compressed_tensors_config(layout, weights, None, ignore)


def chunk_rows(weight: torch.Tensor) -> int:
    """How many rows of `weight` [N, K] to work on at a time."""
    return max(1, _CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])


def in_chunks(
    weight: torch.Tensor, quantize_rows: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """What `quantize_rows` makes of `weight` [N, K], some rows at a time."""
    chunks = [quantize_rows(rows) for rows in weight.split(chunk_rows(weight))]
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** exponent in float32, by its bits: torch.ldexp goes through pow, which need not be exact on a GPU."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
