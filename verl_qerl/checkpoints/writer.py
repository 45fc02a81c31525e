"""A checkpoint written in shards whose layout is known before the first tensor comes.

So tensors are written where they belong as they come, in any order and from any thread, and none is kept: memory does
not grow with the size of a shard, which it would if each were collected for `safetensors.torch.save_file`.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from verl_qerl.checkpoints.record import write_json
from verl_qerl.checkpoints.source import INDEX, SINGLE
from verl_qerl.formats import DEFAULT_FORMAT, WeightFormat
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec


@dataclass(frozen=True)
class _Slot:
    file: str
    position: int
    spec: TensorSpec


def quantized_specs(
    dense: Mapping[str, TensorSpec],
    linears: Iterable[str],
    form: WeightFormat = DEFAULT_FORMAT,
    layout: str = "compressed-tensors",
) -> dict[str, TensorSpec]:
    """What a checkpoint holds once `linears` are packed, in the order of `dense`, what it holds before."""
    packed = set(linears)
    specs: dict[str, TensorSpec] = {}
    for name, spec in dense.items():
        module = name.removesuffix(".weight")
        if module == name or module not in packed:
            specs[name] = spec
            continue
        N, K = spec.shape
        specs |= {f"{module}.{part}": held for part, held in form.specs(N, K, layout).items()}
    return specs


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a few tensors that fit memory as one safetensors file."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    try:
        path.write_bytes(data)  # `save_file` gives the file mode 0600, and a full disk an error of its own
    except OSError as error:
        error.filename = str(path)  # which a failed write does not say
        raise


class ShardedWriter:
    """`model.safetensors`, or `model-0000i-of-0000n.safetensors` and their index.

    A context: leaving it without an error checks that every tensor has come, and writes the index.

    Args:
        folder: Exists and holds no weights.
        max_shard_bytes: Limit of a file's data; a larger tensor gets a file of its own.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> None:
        self._folder = folder
        self._specs = dict(specs)
        self._missing = set(specs)
        self._slots: dict[str, _Slot] = {}
        self._files: dict[str, int] = {}
        shards = _split(self._specs, max_shard_bytes)
        for i, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            self._create(file, names)

    def __enter__(self) -> "ShardedWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the files; without an error, write the index, or raise ValueError if a tensor has not come."""
        for fd in self._files.values():
            os.close(fd)
        if error is not None:
            return
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors were not written, first {min(self._missing)!r}.")
        if len(self._files) > 1:
            total = sum(spec.size_bytes for spec in self._specs.values())
            weight_map = {name: self._slots[name].file for name in sorted(self._slots)}
            write_json(self._folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor. Threads may call this at the same time with different names.

        Raises:
            ValueError: The tensor is not among `specs`, is not as they say, or has come before.
        """
        slot = self._slots.get(name)
        if slot is None or name not in self._missing:
            raise ValueError(f"tensor {name!r} is {'not expected' if slot is None else 'written already'}.")
        if (DTYPES[slot.spec.dtype], slot.spec.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, not {slot.spec}.")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
        _write(self._files[slot.file], data, slot.position)
        self._missing.discard(name)

    def _create(self, file: str, names: list[str]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        # Wide dtypes first, as safetensors does: every tensor starts at a multiple of its own width.
        for name in sorted(names, key=lambda name: -DTYPES[self._specs[name].dtype].itemsize):
            spec = self._specs[name]
            offsets[name], end = end, end + spec.size_bytes
            entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offsets[name], end)}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        fd = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._files[file] = fd
        start = 8 + len(header)
        _write(fd, memoryview(len(header).to_bytes(8, "little") + header), 0)
        os.truncate(fd, start + end)
        self._slots.update({name: _Slot(file, start + offsets[name], self._specs[name]) for name in names})


def _split(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.size_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.size_bytes
    return shards


def _write(fd: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], position + done)
