"""Which kernel multiplies by a packed linear, by the number of rows: plans and measured tables.

Where the paths cross is measured (`python -m verl_qerl tune`).
"""

import functools
import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_qerl.kernels import tiled_matmul
from verl_qerl.kernels.tiled_launch import TOKENS, Launch, for_rows, guess_launch, padded_rows, twins

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """How to multiply by a weight of one shape.

    Attributes:
        launches: Of `kernels.tiled_matmul`, by entries of its TOKENS.
        dense_rows: From here on cuBLAS over a resident copy beats `kernels.tiled_matmul`.
        decode_rows: From here on decoding and cuBLAS beat it.
    """

    launches: tuple[Launch, ...]
    dense_rows: int
    decode_rows: int

    def launch(self, rows: int) -> Launch:
        """The launch of `kernels.tiled_matmul` for a batch."""
        return for_rows(self.launches[TOKENS.index(padded_rows(rows))], rows)

    def kernels(self) -> list[tuple[int, Launch]]:
        """What batches of any size launch: entries of TOKENS and a launch for each."""
        found = list(zip(TOKENS, self.launches, strict=True))
        many = [(tokens, for_rows(launch, TOKENS[-1] + 1)) for tokens, launch in found if twins(tokens) > 1]
        return list(dict.fromkeys(found + many))

    def is_tiled(self, rows: int, resident: bool) -> bool:
        """Whether `kernels.tiled_matmul` takes a batch, beside a resident copy or without one."""
        return rows < (self.dense_rows if resident else self.decode_rows)


PLANS: dict[str, Plan] = {}
_FIELDS = {"N", "K", "launches", "dense_rows", "decode_rows"}  # of a row of a table


def make_plan(N: int, K: int, gpu: str) -> str:
    """Key of the plan for a weight [N, K] on a GPU, made on first use.

    Args:
        N: out_features.
        K: in_features.
        gpu: As CUDA names it.
    """
    key = f"{N}x{K}"
    if key not in PLANS:
        row = nearest(N, K, gpu)
        # The launch of another shape may not fill the GPU with this one.
        measured = row["launches"] if (row["N"], row["K"]) == (N, K) else {}
        launches = tuple(
            Launch(*measured[str(tokens)]) if str(tokens) in measured else guess_launch(N, K, tokens)
            for tokens in TOKENS
        )
        PLANS[key] = Plan(launches, row["dense_rows"], row["decode_rows"])
        tiled_matmul.prepare(PLANS[key].kernels())
    return key


def why_not() -> str | None:
    """Why the kernel choice by rows cannot be used on this machine, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"it is measured on compute capability 9.0 only and this GPU has {major}.{minor}"
    return None


def nearest(N: int, K: int, gpu: str) -> dict[str, Any]:
    """What was measured for a weight [N, K] or the nearest shape: N, K and the fields of Plan."""
    table = _tuned(gpu)
    if not table:
        say_once(f"there is no table of kernels for {gpu!r}; the one of an H200 is used.")
        table = _tuned("NVIDIA H200")
    return min(table, key=lambda row: abs(math.log2(row["N"] / N)) + abs(math.log2(row["K"] / K)))


def table_path(gpu: str) -> Path:
    """Where `tune` writes the table of a GPU, which goes before the one that ships."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "verl_qerl" / _file_name(gpu)


def shipped_path(gpu: str) -> Path:
    """Where the package has the table of a GPU, if it has one."""
    return Path(__file__).parent / "tuned" / _file_name(gpu)


def _file_name(gpu: str) -> str:
    return f"{gpu.lower().replace(' ', '_')}.json"


@functools.cache
def _tuned(gpu: str) -> list[dict[str, Any]]:
    for path in (table_path(gpu), shipped_path(gpu)):
        rows = _rows(path) if path.exists() else []
        if rows:
            return rows
        if path.exists():
            say_once(
                f"{path} is cut short or of another version and left out: run `python -m verl_qerl tune` again, or"
                " delete it."
            )
    return []


def _rows(path: Path) -> list[dict[str, Any]]:
    """Of a table; none of a file that is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no text
        return []
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _FIELDS for row in rows):
        return []
    return rows


@functools.cache
def say_once(message: str) -> None:
    """Log a warning unless it was logged before."""
    logger.warning("verl_qerl: %s", message)
