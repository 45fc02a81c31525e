"""A model directory: opened by its headers, found on the hub, and its tensors as the files hold them."""

import errno
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl_qerl.checkpoints.experts import check_experts
from verl_qerl.checkpoints.model_config import local_path, read_config, read_object
from verl_qerl.checkpoints.quantization_config import check_described, described, stored_format
from verl_qerl.checkpoints.reader import read_shard
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats.ignore import linears_in
from verl_qerl.formats.nvfp4_layout import is_activation_scale
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODELOPT = "hf_quant_config.json"
_OF_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """A model directory whose tensors are known but not read.

    Attributes:
        format: Name of the weight format of its linears, or BLOCK_FP8; None: they are not quantized.
        layout: How their tensors are named: `bf16`, `compressed-tensors` or `modelopt`.
        files: tensor name -> shard file name.
        specs: tensor name -> dtype and shape as stored.
    """

    path: Path
    config: dict
    format: str | None
    layout: str
    files: dict[str, str]
    specs: dict[str, TensorSpec] = field(repr=False)

    def tensors(self, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) as the files hold them, shard by shard."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        for file in sorted(set(self.files.values())):
            for name, tensor in _read(self.path / file, device):
                if self.files[name] == file:  # a tensor that two shards hold comes once
                    yield name, tensor

    def linears(self, ignore: Sequence[str]) -> set[str]:
        """Linears inside the layers, packed or not, whose `weight` is a matrix, but those that `ignore` names."""
        return set(linears_in({name: spec.shape for name, spec in self.specs.items()}, ignore))


def open_source(path: str | Path, revision: str | None = None, cache_dir: str | None = None) -> Source:
    """Read config.json and the headers of every shard.

    Args:
        path: Directory of the model, or a hub id; for `revision` and `cache_dir` of one see `local_path`.

    Raises:
        CheckpointFormatError: A file is missing or cut short, the index names a tensor that no shard holds, or the
            checkpoint is quantized in another way, lacks a layer, or has experts of another kind or not all of them.
    """
    path = local_path(path, revision, cache_dir)
    if path.is_file():
        raise CheckpointFormatError(
            f"{path} is a file. The directory of a model in Hugging Face layout, or a hub id, is accepted. Name the"
            " directory."
        )
    config = stored_config(path)
    if found := described(config):
        config = {name: value for name, value in config.items() if name != "compression_config"}
        config["quantization_config"] = found
    form, layout = stored_format(config, str(path))
    check_described(str(path), config)
    files, specs = _read_headers(path)
    _check_layers(path, config, files)
    check_experts(str(path), config, files)
    return Source(path, config, form, layout, files, specs)


def stored_config(model: str | Path) -> dict[str, Any]:
    """`read_config`, with what an older ModelOpt wrote beside it of the quantization; vLLM reads it likewise."""
    config, beside = read_config(model), Path(model) / MODELOPT
    if not config.get("quantization_config") and beside.exists():
        quantization = described({"quantization_config": read_object(beside).get("quantization")})
        config = {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}
    return config


def _read_headers(path: Path) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """Tensor name -> shard that holds it, and -> dtype and shape; of a tensor in two shards as the index says."""
    indexed = _weight_map(path / INDEX) if (path / INDEX).exists() else {}
    if not indexed and not (path / SINGLE).is_file():
        raise _without_weights(path)
    files: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    for shard in sorted(set(indexed.values())) or [SINGLE]:
        for name, spec in read_specs(path / shard).items():
            if indexed.get(name, shard) == shard:
                files[name], specs[name] = shard, spec
    lost = sorted(set(indexed) - set(files))
    if lost:
        raise CheckpointFormatError(
            f"{path / INDEX} names {len(lost)} tensors that their shard does not hold, first {lost[0]!r} of"
            f" {indexed[lost[0]]}. Every indexed tensor must be there. Download the model again."
        )
    return files, specs


def _check_layers(path: Path, config: Mapping, names: Iterable[str]) -> None:
    found = weights_of_layers(names)
    count = config.get("num_hidden_layers")
    lost = next((i for i in range(count) if i not in found), None) if found and isinstance(count, int) else None
    if lost is not None:
        raise CheckpointFormatError(
            f"{path} holds no layer {lost}, and its config.json says num_hidden_layers={count}. Every layer, from 0 on,"
            " must be there. Download the model again, or check that config.json belongs to these weights."
        )


def weights_of_layers(names: Iterable[str]) -> dict[int, set[str]]:
    """Layer -> names in it of modules with a weight."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        if match := _OF_LAYER.match(name):
            modules = found[int(match[1])]
            module, weight, _ = name[match.end() :].rpartition(".weight")
            if weight:
                modules.add(module)
    return found


def _without_weights(path: Path) -> CheckpointFormatError:
    """What a directory holds in the place of weights that are read."""
    found = sorted(file.name for file in path.iterdir())
    shards = [name for name in found if name.endswith(".safetensors")]
    pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    if any(name.startswith("adapter_model.") for name in found):
        what, remedy = "holds an adapter and no model", "Name the model that it was trained on"
    elif shards:
        what = f"holds {len(shards)} safetensors files, first {shards[0]}, and no {INDEX} that says what is in them"
        remedy = "Download the index too"
    elif pickled:
        what = f"holds its weights in another kind of file, {pickled[0]}"
        remedy = "Load the model in transformers and save it again with save_pretrained, which writes safetensors"
    else:
        what, remedy = "holds no weights", "Download the model again"
    return CheckpointFormatError(f"{path} {what}. Accepted are {SINGLE}, or shards with their {INDEX}. {remedy}.")


def _weight_map(path: Path) -> dict[str, str]:
    found = read_object(path).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointFormatError(
            f"{path} does not say which shard holds what: weight_map={str(found)[:80]}. An object of tensors and their"
            " files is accepted. Download the model again."
        )
    return found


def read_tensors(source: Source, names: Iterable[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Some tensors of an unquantized checkpoint as the files hold them, whatever shards they are in."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(source.files[name], []).append(name)
    found = {}
    for file, held in by_file.items():
        with _open(source.path / file) as shard:
            found |= {name: shard.get_tensor(name).to(device) for name in held}
    return found


def whole_weights(
    source: Source, modules: Set[str], device: str | torch.device, drops_activation_scales: bool
) -> Iterator[tuple[str, torch.Tensor | dict[str, torch.Tensor]]]:
    """The tensors of a checkpoint, those of one packed weight together.

    Args:
        modules: Those with packed weights.
        drops_activation_scales: Leave out what scales activations or a KV cache.

    Yields:
        (module, {name without the module: tensor}) once all but the bias of one of `modules` have come, (name, tensor)
        for everything else.
    """
    names = [name for name in source.files if not (drops_activation_scales and is_activation_scale(name))]
    wanted: dict[str, set[str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        if module in modules and part != "bias":
            wanted.setdefault(module, set()).add(part)
    kept, waiting = set(names), dict[str, dict[str, torch.Tensor]]()
    for name, tensor in source.tensors(device):
        module, _, part = name.rpartition(".")
        if part in wanted.get(module, ()):
            held = waiting.setdefault(module, {})
            held[part] = tensor
            if set(held) == wanted[module]:
                yield module, waiting.pop(module)
        elif name in kept:
            yield name, tensor


def _read(path: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    if device.type == "cuda":
        yield from read_shard(path, device)
        return
    with _open(path) as shard:  # pages are read as they are used, and arithmetic on a CPU is slower than that
        for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, shard.get_tensor(name)


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """What the header of a safetensors file says of each tensor; a CheckpointFormatError if that cannot be read."""
    with _open(path) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        specs = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    unknown = sorted({spec.dtype for spec in specs.values()} - set(DTYPES))
    if unknown:
        raise CheckpointFormatError(
            f"{path} holds tensors of dtype {unknown}. Accepted are {sorted(DTYPES)}. Convert the checkpoint first."
        )
    return specs


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        if path.exists():  # safetensors tells every file so that it cannot open
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from error
        raise CheckpointFormatError(
            f"a shard is missing: {path}. Every shard that the index names must be there. Download the model again."
        ) from error
    except SafetensorError as error:
        raise CheckpointFormatError(
            f"a shard cannot be read: {path} ({error}). A whole safetensors file is accepted."
            " It may be cut short: download it again."
        ) from error
