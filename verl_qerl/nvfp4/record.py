"""What a training checkpoint says of the frozen base that it does not hold, and of the adapter on it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_qerl.errors import CheckpointFormatError

RECORD = "verl_qerl_base.json"


@dataclass(frozen=True)
class BaseRecord:
    """The file `verl_qerl_base.json` beside the shards of a checkpoint.

    Attributes:
        base: model.path of the run: a directory, absolute, or a hub id.
        scale: Scale choice, for a base that was quantized while it was read.
        ignore: Modules such a base keeps in bf16.
        digests: module -> `weight_digest` of each packed linear.
        adapter: Options of PEFT's LoraConfig that are set or differ from its defaults.
    """

    base: str
    scale: str
    ignore: tuple[str, ...]
    digests: Mapping[str, str] = field(repr=False)
    adapter: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        partial = folder / f".{RECORD}.partial"
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / RECORD)


def read_record(folder: Path) -> BaseRecord | None:
    """The record in `folder`; None for a checkpoint that another engine wrote.

    Raises:
        CheckpointFormatError: The file is damaged or of another version.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        record = BaseRecord(**found)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise CheckpointFormatError(
            f"the record of the base cannot be read: {path} ({error}). The file that the engine wrote is accepted. "
            "Export another checkpoint, or one with the verl_qerl that wrote it."
        ) from error
    return BaseRecord(record.base, record.scale, tuple(record.ignore), record.digests, record.adapter)
