"""What a training checkpoint says of the frozen base that it does not hold, and of the adapter on it."""

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from verl_qerl.errors import CheckpointFormatError

RECORD = "verl_qerl_base.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's, beside the steps of a run
Content = TypeVar("Content")


@dataclass(frozen=True)
class BaseRecord:
    """The file `verl_qerl_base.json` beside the shards of a checkpoint.

    Attributes:
        base: model.path of the run: a directory, absolute, or a hub id.
        scale: Scale choice, for a base that was quantized while it was read.
        ignore: Modules such a base keeps in bf16.
        digests: module -> `weight_digest` of each packed linear.
        adapter: Options of PEFT's LoraConfig that are set or differ from its defaults.
        world_size: Ranks that wrote the shards.
        lora_only: The shards hold what is trained and nothing else of the model.
        files: name -> `file_mark` of every file that a resume reads, in older records its bytes alone; empty until all
            of them are written.
        trained_norms: Which norms of each layer are trained besides the adapter.
        format: Name of the base's weight format; records written before there was a choice lack it.
        sharded_over: Ranks that one copy of what is trained was spread over; 0 in records written before it was kept.
    """

    base: str
    scale: str
    ignore: tuple[str, ...]
    digests: Mapping[str, str] = field(repr=False)
    adapter: Mapping[str, Any]
    world_size: int = 1
    lora_only: bool = False
    files: Mapping[str, Any] = field(default_factory=dict, repr=False)
    trained_norms: tuple[str, ...] = ()
    format: str = "nvfp4"
    sharded_over: int = 0

    def lies_as(self, other: "BaseRecord") -> bool:
        """Whether the same ranks have the same parts in both."""
        known = self.sharded_over and other.sharded_over
        return self.world_size == other.world_size and (not known or self.sharded_over == other.sharded_over)

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all.

        With `files` it marks the checkpoint as whole. Write it without them first, and with them when every other file
        is there.
        """
        write_whole(folder / RECORD, asdict(self))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def partial_of(path: Path) -> Path:
    """What becomes the file when it is whole; a killed process may leave it."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON, the whole file or none; a killed process leaves what was there.

    Raises:
        OSError: It cannot be written; the path is named, and nothing else is left.
    """
    partial = partial_of(path)
    try:
        write_json(partial, content)
        os.replace(partial, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # a full disk names none
        partial.unlink(missing_ok=True)
        raise


def read_whole(path: Path, make: Callable[[Any], Content], what: str, remedy: str) -> Content | None:
    """What `make` makes of a file of `write_whole`; None where there is none.

    Args:
        make: Takes the decoded JSON, whatever it is. It may fail as code does on values of another kind.
        what: Beginning of the error: `the record of UAQ`.

    Raises:
        CheckpointFormatError: The file is damaged or of another version.
    """
    if not path.is_file():
        return None
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of JSON and of its decoding too
        raise CheckpointFormatError(
            f"{what} cannot be read: {path} ({error!r}). The file as verl_qerl wrote it is accepted. {remedy}"
        ) from error


def read_record(folder: Path) -> BaseRecord | None:
    """The record in `folder`, None if another engine wrote the checkpoint; raises as `read_whole`."""

    def make(found: Any) -> BaseRecord:
        record = BaseRecord(**found)
        kinds = {"base": str, "scale": str, "format": str, "digests": dict, "adapter": dict, "files": dict}
        for name, kind in kinds.items():
            if not isinstance(getattr(record, name), kind):
                raise TypeError(f"{name}={getattr(record, name)!r}")
        for name in ("ignore", "trained_norms"):
            if not all(isinstance(one, str) for one in getattr(record, name)):
                raise TypeError(f"{name}={getattr(record, name)!r}")
        return replace(record, ignore=tuple(record.ignore), trained_norms=tuple(record.trained_norms))

    remedy = "Take another checkpoint, or the verl_qerl that wrote it."
    return read_whole(folder / RECORD, make, "the record of the base", remedy)


def file_mark(path: Path) -> list[int]:
    """What tells a file from another: its bytes, and of one of torch.save the checksum of what it says it holds.

    That is the table at its end: tensors are not read.
    """
    mark = [path.stat().st_size]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            mark.append(zlib.crc32(repr([entry.CRC for entry in archive.infolist()]).encode()))
    return mark


def damaged_file(folder: Path, files: Mapping[str, Any]) -> str | None:
    """What is wrong with the first of `files` (name -> its mark) that is absent or another one, or None."""
    for name, mark in sorted(files.items()):
        path = folder / name
        size, *contents = mark if isinstance(mark, list) else [mark]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
        if contents and file_mark(path) != mark:
            return f"{name} holds something else"
    return None
