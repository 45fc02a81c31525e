"""A checkpoint as a stream of packed weights and other tensors: the one reader of the command line, actor and rollout.

A bf16 checkpoint is quantized on the way, an NVFP4 one passes as it is. Memory: one tensor of a shard, plus the members
of a fused group (q, k, v; gate, up) that are still waiting for each other.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from verl_qerl.checkpoints.described import BLOCK_FP8, check_arguments, check_described, described, stored_format
from verl_qerl.checkpoints.experts import check_all_packed, check_experts
from verl_qerl.checkpoints.groups import in_groups, linears_among
from verl_qerl.checkpoints.json_object import read_object
from verl_qerl.checkpoints.reader import read_shard
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import nvfp4_layout
from verl_qerl.formats.nvfp4_weight import BLOCK_SIZE, PackedWeight
from verl_qerl.formats.reference import DEFAULT_SCALE, quantize_group
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODELOPT = "hf_quant_config.json"
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configuration, tokenizer


@dataclass(frozen=True)
class Source:
    """A model directory whose tensors are known but not read.

    Attributes:
        path: The directory.
        config: Its config.json.
        layout: `bf16`, `compressed-tensors` or `modelopt`, or the name of another format; see `stored_format`.
        files: tensor name -> shard file name.
        specs: tensor name -> dtype and shape as stored.
    """

    path: Path
    config: dict
    layout: str
    files: dict[str, str]
    specs: dict[str, TensorSpec] = field(repr=False)

    @property
    def shards(self) -> list[str]:
        """Shard file names in order."""
        return sorted(set(self.files.values()))

    @property
    def format(self) -> str | None:
        """Name of the weight format of its linears; None: they are not quantized."""
        return {"bf16": None, "compressed-tensors": "nvfp4", "modelopt": "nvfp4"}.get(self.layout, self.layout)

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) as the files hold them, shard by shard; a GPU is given with its index."""
        for file in self.shards:
            for name, tensor in _read(self.path / file, device):
                if self.files[name] == file:  # a tensor that two shards hold comes once
                    yield name, tensor


def open_source(path: str | Path, revision: str | None = None, cache_dir: str | None = None) -> Source:
    """Read config.json and the headers of every shard.

    Args:
        path: Of the model, or a hub id, which is fetched.
        revision: Of a hub id: branch, tag or commit (default: main).
        cache_dir: Where a hub id is fetched to (default: Hugging Face's cache).

    Raises:
        CheckpointFormatError: A file is missing or cut short, the index names a tensor that no shard holds, or the
            checkpoint is quantized in another way, or its experts are of another kind or not all there.
    """
    path = _local(path, revision, cache_dir)
    if path.is_file():
        raise CheckpointFormatError(
            f"{path} is a file. The directory of a model in Hugging Face layout, or a hub id, is accepted. Name the"
            " directory."
        )
    config = read_object(path / "config.json")
    if not config.get("quantization_config") and (path / MODELOPT).exists():  # older ModelOpt; vLLM reads it likewise
        quantization = read_object(path / MODELOPT).get("quantization")
        config = {**config, "quantization_config": {"quant_method": "modelopt", **(quantization or {})}}
    if found := described(config):
        config = {name: value for name, value in config.items() if name != "compression_config"}
        config["quantization_config"] = found
    layout = stored_format(config, str(path))
    check_described(str(path), config)
    files, specs = _read_headers(path)
    check_experts(str(path), config, files)
    return Source(path, config, layout, files, specs)


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


def check_format(source: Source, form: str) -> None:
    """Require weights that are not quantized, or in `form`.

    Raises:
        CheckpointFormatError: They are in another format.
    """
    if source.format not in (None, form):
        use = "" if source.format == BLOCK_FP8 else f"Use +rollout={source.format}, or point"
        raise CheckpointFormatError(
            f"{source.path} is quantized in another format: {source.format}, and {form} is asked for. Accepted are"
            f" unquantized weights and {form}. {use or 'Point'} model.path at the original bf16 model, or at what"
            f" `python -m verl_qerl quantize --requantize --format {form}` makes of this one."
        )


def _local(path: str | Path, revision: str | None, cache_dir: str | None) -> Path:
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return Path(path)
    # A hub id, as verl and vLLM take it; both sides of a run find the files in the same cache.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), revision=revision, cache_dir=cache_dir, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        asked = f"{path} at revision {revision}" if revision else path
        raise CheckpointFormatError(
            f"{asked} is neither a directory nor a model of the hub that can be reached ({type(error).__name__})."
            " A directory in Hugging Face layout or a hub id is accepted. Check the name, or download it first."
        ) from error


def linear_modules(
    source: Source, ignore: Sequence[str] | None = None, block_size: int = BLOCK_SIZE, kind: str = "NVFP4"
) -> set[str]:
    """The modules of a bf16 source that `stream` quantizes; see `linears_among`."""
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    return linears_among(shapes, ignore, str(source.path), block_size, kind)


def stream(
    source: Source,
    scale: str = DEFAULT_SCALE,
    ignore: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    observe: Callable[[str, torch.Tensor, PackedWeight], None] | None = None,
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    """Every tensor of the checkpoint, linears packed.

    Args:
        source: From `open_source`.
        scale: Scale choice for a bf16 source; see `formats.reference.quantize_group`.
        ignore: Modules of a bf16 source left unquantized (default: lm_head). An NVFP4 source brings its own list.
        device: Where weights are read to and quantized.
        observe: Called with module, original and packed weight of each linear that is quantized here.

    Yields:
        (module name, PackedWeight) for a quantized linear, (tensor name, tensor) for everything else.

    Raises:
        ValueError: A weight is incomplete or cannot be held by NVFP4, or a group disagrees; see `linear_modules`. Or
            the source is quantized in another format.
    """
    check_format(source, "nvfp4")
    if source.layout != "bf16":
        check_arguments(str(source.path), source.config, nvfp4_layout.quantization_config(), "nvfp4")
        yield from _stream_packed(source, device)
    else:
        yield from pack(stored_tensors(source, device), linear_modules(source, ignore), scale, observe)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    linears: Set[str],
    scale: str = DEFAULT_SCALE,
    observe: Callable[[str, torch.Tensor, PackedWeight], None] | None = None,
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    """Quantize the weights of `linears` as they come; see `stream`.

    Args:
        tensors: (name, tensor), in any order; every weight of `linears` among them.
        linears: Modules whose `weight` is packed.
        scale: Scale choice.
        observe: As `stream`'s.
    """
    for name, item in in_groups(tensors, linears):
        if isinstance(item, torch.Tensor):
            yield name, item
            continue
        packed = quantize_group(item, scale)
        for member in packed:
            if observe:
                observe(member, item[member], packed[member])
        yield from packed.items()


def _stream_packed(source: Source, device: str | torch.device) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    modules = packed_modules(source)
    check_all_packed(str(source.path), {name.rpartition(".")[0] for name in source.files} - modules)
    wanted: dict[str, set[str]] = {}
    for name in source.files:
        module = name.rpartition(".")[0]
        if module in modules and "bias" not in name and not nvfp4_layout.is_activation_scale(name):
            wanted.setdefault(module, set()).add(name.rpartition(".")[2])
    parts: dict[str, dict[str, torch.Tensor]] = {}
    fused: dict[str, dict[str, PackedWeight]] = {}
    rounded = 0
    for name, tensor in stored_tensors(source, device):
        module, _, kind = name.rpartition(".")
        if nvfp4_layout.is_activation_scale(name):
            continue
        if kind not in wanted.get(module, ()):
            yield name, tensor
            continue
        held = parts.setdefault(module, {})
        held[kind] = tensor
        if set(held) != wanted[module]:
            continue
        key, members = nvfp4_layout.fused_group(module)
        group = fused.setdefault(key, {})
        group[module] = nvfp4_layout.from_tensors(module, parts.pop(module), source.layout)
        if set(group) == modules.intersection(members):
            shared = nvfp4_layout.share_scale(fused.pop(key))
            rounded += sum(math.frexp(float(weight.global_decode_scale))[0] != 0.5 for weight in shared.values())
            yield from shared.items()
    if rounded:
        logger.warning(
            "%s: the global scales of %d linears are no powers of two, so that their dense weights are rounded to bf16,"
            " by the actor and not by every kernel of the rollout: they differ by up to 2**-8 of a weight. Quantize the"
            " bf16 model with `python -m verl_qerl quantize` for the same weights on both sides.",
            source.path,
            rounded,
        )


def packed_modules(source: Source) -> set[str]:
    """The modules whose weights an NVFP4 source holds packed, in whole or in part."""
    # Any part makes a module a packed one, so that a missing part is noticed.
    return {name.rpartition(".")[0] for name in source.files if name.endswith(nvfp4_layout.PARTS[source.layout])}


def stored_tensors(source: Source, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) as the files hold them, shard by shard."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    yield from source.tensors(device)


def read_tensors(source: Source, names: Iterable[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Some tensors of an unquantized checkpoint as the files hold them, whatever shards they are in."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(source.files[name], []).append(name)
    found = {}
    for file, held in by_file.items():
        with _open(source.path / file, "cpu") as shard:
            found |= {name: shard.get_tensor(name).to(device) for name in held}
    return found


def _read(path: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    if device.type == "cuda":
        yield from read_shard(path, device)
        return
    with _open(path, "cpu") as shard:  # pages are read as they are used, and arithmetic on a CPU is slower than that
        for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, shard.get_tensor(name)


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """What the header of a safetensors file says of each tensor.

    Raises:
        CheckpointFormatError: It is missing or cut, or has a dtype that is not known.
    """
    with _open(path, "cpu") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        specs = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    unknown = sorted({spec.dtype for spec in specs.values()} - set(DTYPES))
    if unknown:
        raise CheckpointFormatError(
            f"{path} holds tensors of dtype {unknown}. Accepted are {sorted(DTYPES)}. Convert the checkpoint first."
        )
    return specs


def _open(path: Path, device: str) -> safe_open:
    try:
        return safe_open(path, framework="pt", device=device)
    except FileNotFoundError as error:
        raise CheckpointFormatError(
            f"a shard is missing: {path}. Every shard that the index names must be there. Download the model again."
        ) from error
    except SafetensorError as error:
        raise CheckpointFormatError(
            f"a shard cannot be read: {path} ({error}). A whole safetensors file is accepted."
            " It may be cut short: download it again."
        ) from error
