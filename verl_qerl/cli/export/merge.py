"""Base and adapter as one stream of bf16 tensors; memory: a few tensors, whatever the size of the model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.dense_source import dense_source
from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.record import BaseRecord, read_whole
from verl_qerl.checkpoints.source import Source, open_source
from verl_qerl.checkpoints.stream import check_format, packed_names, packed_stream
from verl_qerl.cli.dense_model import is_tied
from verl_qerl.cli.export.adapter import Adapter
from verl_qerl.cli.export.fsdp_checkpoint import Checkpoint
from verl_qerl.cli.model_dir import QUANTIZATION_REPORT, check_finite
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import DEFAULT_FORMAT, PackedWeight, get_format
from verl_qerl.formats.ignore import DEFAULT_IGNORE, is_packed_module, is_router
from verl_qerl.formats.reference import dequantize
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

_COMPUTED = "rotary_emb.inv_freq"  # in files of older Llamas: no model loads it, so no training saves it


@dataclass(frozen=True)
class Base:
    """The frozen model that a checkpoint was trained on.

    Attributes:
        name: Directory or hub id, as given or recorded.
        record: What the checkpoint says of it; None when another engine than ours wrote the checkpoint.
        format: Name of the weight format of `linears`: as training saw them, nvfp4 where that was not packed.
        linears: Modules that were packed in training (`is_packed`), or are in a quantized export.
        specs: name -> dtype and shape of every tensor of the model once it is bf16.
    """

    name: str
    source: Source
    record: BaseRecord | None
    format: str
    linears: set[str] = field(repr=False)
    specs: dict[str, TensorSpec] = field(repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether training saw `linears` packed."""
        return self.record is not None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Module -> (out, in) of every matrix."""
        return matrix_shapes(self.specs)

    @property
    def ignore(self) -> list[str]:
        """The linears of decoder layers that no quantized export packs, in full, and lm_head."""
        kept = (name for name in self.shapes if is_router(name) or is_packed_module(name, self.linears))
        return [*DEFAULT_IGNORE, *kept]

    @property
    def scale(self) -> str | None:
        """The scale choice that NVFP4 was made with, where the run or `quantize` wrote it down.

        Weights that are quantized again with another one lose more than a step of the grid.
        """
        if self.source.format is None:
            return self.record.scale if self.record else None

        def make(report: Any) -> set[str]:
            return {layer["scale"] for layer in report["layers"].values()}

        remedy = "Name --scale and remove the file."
        found = read_whole(self.source.path / QUANTIZATION_REPORT, make, "the report beside the base", remedy)
        return found.pop() if found and len(found) == 1 else None

    def items(self, device: str) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
        """The model as training saw it; see `checkpoints.stream`."""
        if self.record is None:
            return self.source.tensors(device)
        form = get_format(self.format, self.record.scale)
        return packed_stream(self.source, form, self.record.ignore, device)


def open_base(path: str | Path | None, checkpoint: Checkpoint) -> Base:
    """The base of a checkpoint.

    Args:
        path: Directory or hub id, in place of the one that the checkpoint names.

    Raises:
        ValueError: No base is named, it cannot be read, or it is packed and that of the run was not.
    """
    record = checkpoint.record
    named = record.base if record else (checkpoint.uaq or {}).get("base")
    if path is None and (named is None or (Path(named).is_absolute() and not Path(named).exists())):
        raise ValueError(
            f"the base is not found: {checkpoint.folder} names {named or 'none'}. The model.path of the run, or a copy"
            " of it, is accepted. Give it with --base (eval: --model)."
        )
    name = str(path or named)
    source = open_source(name)
    form = get_format(record.format if record else source.format or DEFAULT_FORMAT.name)
    check_format(source.path, source.format, form.name)
    linears = packed_names(source, form, record.ignore if record else None)
    if source.format is not None and record is None:
        raise ValueError(
            f"the checkpoint was not trained on a packed base: base={name} is in {source.format}, with"
            f" {checkpoint.folder}. The bf16 model is accepted. Name the model.path of the run with --base (eval:"
            " --model)."
        )
    specs = {
        name: TensorSpec("BF16", spec.shape) if DTYPES[spec.dtype].is_floating_point else spec
        for name, spec in dense_specs(source).items()
    }
    return Base(name, source, record, form.name, linears, specs)


def dense_specs(source: Source) -> dict[str, TensorSpec]:
    """Name -> dtype and shape of every tensor of the model that a checkpoint stands for, quantized or not."""
    return source.specs if source.format is None else dense_source(source).specs


def matrix_shapes(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Module -> (out, in) of every matrix."""
    return {
        name.removesuffix(".weight"): spec.shape
        for name, spec in specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2
    }


@dataclass
class Merge:
    """One pass over base and checkpoint.

    Attributes:
        relative_update: module -> ||merged - base|| / ||merged||, Frobenius norms; 1 where zeros are left. Filled by
            `tensors`.
        changed: Names of tensors besides the adapter that training changed, filled by `tensors`.
        digests: module -> digest of the packed base, filled by `tensors`.
        norm_updates: module -> (||trained - base||, ||trained - bf16(trained)||), filled by `tensors`.
    """

    base: Base
    adapter: Adapter
    checkpoint: Checkpoint
    device: str
    observe: Callable[[int], object]
    relative_update: dict[str, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    norm_updates: dict[str, tuple[float, float]] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the merged model: bf16(base + scaling * B A) or of a norm's sum, taken in float32.

        `observe` is called with the bytes of each tensor that was read, as of the merged model.

        Raises:
            CheckpointFormatError: The base is not the one that the checkpoint was trained on.
            ValueError: A tensor of the base is not finite.
        """
        for name, _, merged in self._walk():
            yield name, merged

    def beside_the_adapter(self) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
        """(linear, packed weight) and (name, tensor): the base with trained norms, for the adapter to be put on.

        The rest is as in `tensors`.
        """
        for name, item, _ in self._walk():
            yield name.removesuffix(".weight") if isinstance(item, PackedWeight) else name, item

    def _walk(self) -> Iterator[tuple[str, PackedWeight | torch.Tensor, torch.Tensor]]:
        """(name, what the adapter is put on, the merged tensor)."""
        self._check_others()
        for name, item in self.base.items(self.device):
            if isinstance(item, PackedWeight):
                self.digests[name] = weight_digest(item)
                self._check_digests([name])
                self.observe(self.base.specs[f"{name}.weight"].size_bytes)
                yield f"{name}.weight", item, self._merge(name, dequantize(item, torch.float32))
                continue
            self.observe(self.base.specs[name].size_bytes)
            if not item.is_floating_point():
                yield name, item, item
                continue
            weight = self._trained(name, item)
            module = name.removesuffix(".weight")
            if module in self.checkpoint.norms:
                weight = self._shifted(module, weight)
            rounded = weight.to(torch.bfloat16)  # once: of a run of all weights everything is float32
            check_finite(name, rounded)
            yield name, rounded, self._merge(module, weight) if module in self.adapter.factors else rounded
        if self.base.record:
            self._check_digests(sorted(self.base.record.digests))  # all have come

    def _merge(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        if module not in self.adapter.factors:
            return weight.to(torch.bfloat16)
        weight = weight.float()
        merged = (weight + self.adapter.delta(module, weight.device)).to(torch.bfloat16)
        norm = float(merged.float().norm(dtype=torch.float64))
        difference = float((merged.float() - weight).norm(dtype=torch.float64))
        self.relative_update[module] = _share(difference, norm)
        return merged

    def _trained(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The checkpoint's own tensor, where it holds one."""
        trained = self.checkpoint.others.get(name)
        if trained is None:
            return tensor
        trained = trained.to(tensor.device)
        if not bool(trained.isfinite().all()):
            raise CheckpointFormatError(
                f"the checkpoint holds NaN or infinite values: {name!r}. Numbers are accepted. Export an earlier step."
            )
        if not torch.equal(trained, tensor.to(trained.dtype)):
            self.changed.append(name)
            module = name.removesuffix(".weight")
            if module in self.base.linears:
                self.relative_update[module] = _share(float((trained - tensor).norm()), float(trained.norm()))
        return trained

    def _shifted(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """The trained weight of a norm, in bf16."""
        shift = self.checkpoint.norms[module].to(weight.device)
        trained = weight.float() + shift
        written = trained.to(torch.bfloat16)
        self.norm_updates[module] = float(shift.norm()), float((written.float() - trained).norm())
        if shift.any():
            self.changed.append(f"{module}.weight")
        return written

    def _check_others(self) -> None:
        others = self.checkpoint.others
        for name, shift in self.checkpoint.norms.items():
            self._check_shape(f"{name}.weight", shift, f"trains the norm {name!r}", "norms")
        tied = is_tied(self.base.source.config)
        if not self.adapter.factors:
            needed = {name for name in self.base.specs if not name.endswith(_COMPUTED)}
            lacking = sorted(needed - others.keys() - ({"lm_head.weight"} if tied else set()))
            if lacking:
                raise CheckpointFormatError(
                    f"the checkpoint does not fit the base: it lacks {lacking[0]!r} ({len(lacking)} tensors). All of"
                    " the base's are needed without an adapter. Name the right base with --base (eval: --model)."
                )
        for name, tensor in others.items():
            is_head = name not in self.base.specs and tied and name == "lm_head.weight"
            if is_head and torch.equal(tensor, others.get("model.embed_tokens.weight", tensor)):
                continue  # the embedding once more
            self._check_shape(name, tensor, f"holds {name!r}", "tensors")

    def _check_shape(self, name: str, tensor: torch.Tensor, what: str, accepted: str) -> None:
        spec = self.base.specs.get(name)
        if spec is None or spec.shape != tuple(tensor.shape):
            raise CheckpointFormatError(
                f"the checkpoint does not fit the base: it {what} of {tuple(tensor.shape)}, the base has"
                f" {'none' if spec is None else spec.shape}. The same {accepted} are accepted. Name the right base with"
                " --base (eval: --model)."
            )

    def _check_digests(self, modules: Iterable[str]) -> None:
        wanted = self.base.record.digests if self.base.record else {}
        for module in modules:
            if wanted.get(module) != self.digests.get(module):
                raise CheckpointFormatError(
                    f"the base is not the one of the checkpoint: {self.base.source.path} holds {module!r} with digest"
                    f" {self.digests.get(module)}, the checkpoint names {wanted.get(module)}. The same bits are"
                    " accepted. Name the model.path of the run with --base (eval: --model)."
                )


def _share(difference: float, norm: float) -> float:
    return difference / norm if norm > 0 else float(difference > 0)
