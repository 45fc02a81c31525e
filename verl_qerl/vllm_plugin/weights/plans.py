"""Which kernel multiplies by a packed linear, by the number of rows: plans and measured tables.

Where the paths cross is measured (`python -m verl_qerl tune`).
"""

import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_qerl.kernels.rollout import w4a16_matmul
from verl_qerl.kernels.rollout.w4a16_launch import (
    GATHERED,
    TOKENS,
    Launch,
    for_rows,
    launch_candidates,
    multicast_blocks,
    padded_rows,
)
from verl_qerl.vllm_plugin.log import say_once


@dataclass(frozen=True)
class Plan:
    """How to multiply by a weight of one shape.

    Attributes:
        launches: One launch of `kernels.rollout.w4a16_matmul` for each entry of its TOKENS.
        decode_rows: From here on decoding and cuBLAS beat `kernels.rollout.w4a16_matmul`.
    """

    launches: tuple[Launch, ...]
    decode_rows: int

    def launch(self, rows: int) -> Launch:
        """The launch of `kernels.rollout.w4a16_matmul` for a batch."""
        return for_rows(self.launches[TOKENS.index(padded_rows(rows))], rows)

    def kernels(self) -> list[tuple[int, Launch]]:
        """What batches of any size launch: entries of TOKENS and a launch for each."""
        found = list(zip(TOKENS, self.launches, strict=True))
        many = [(tokens, for_rows(launch, TOKENS[-1] + 1)) for tokens, launch in found if multicast_blocks(tokens) > 1]
        return list(dict.fromkeys(found + many))

    def uses_kernel(self, rows: int) -> bool:
        """Whether `kernels.rollout.w4a16_matmul` takes a batch."""
        return rows < self.decode_rows


PLANS: dict[str, Plan] = {}
_OTHERWISE = "NVIDIA H200"  # whose table is used where there is none
# Weights closer than that have the same fastest launch more often than a guess is right, others less often: one of
# another size may not fill the GPU.
_ALIKE = 1.0
_FIELDS = {"N", "K", "launches", "decode_rows"}  # of a row of a table


def make_plan(N: int, K: int, gpu: str, tile: int = 128) -> str:
    """Key of the plan for a weight [N, K] on a GPU, by the name that CUDA gives; made on first use.

    Args:
        tile: Columns that surely belong to one member of a fused linear, up to 128: what `can_fuse` asks a launch for.
    """
    key = f"{N}x{K}" if tile >= 128 else f"{N}x{K}/{tile}"
    if key not in PLANS:
        row = nearest(N, K, gpu)
        launches = tuple(choose_launch(row, N, K, tokens, tile) for tokens in TOKENS)
        PLANS[key] = Plan(launches, row["decode_rows"])
        w4a16_matmul.prepare(PLANS[key].kernels())
    return key


def choose_launch(row: dict[str, Any], N: int, K: int, tokens: int, tile: int = 128) -> Launch:
    """The launch for a weight [N, K] and an entry of TOKENS: that of `row` (see `nearest`) if it fits, else a guess.

    Launches that would leave the adapter to others are passed over: those round the output before they add it.
    """
    candidates = launch_candidates(N, K, tokens)
    # Of members in tiles below 64 no launch takes an adapter.
    fitting = [launch for launch in candidates if tile % (64 * launch.warp_tiles) == 0] or candidates
    if distance((row["N"], row["K"]), (N, K)) < _ALIKE and str(tokens) in row["launches"]:
        launch = Launch(*row["launches"][str(tokens)])
        if launch._replace(intermediate=GATHERED) in fitting:
            return launch
    return fitting[0]


def why_not() -> str | None:
    """Why the kernel choice by rows cannot be used on this machine, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"it is measured on compute capability 9.0 only and this GPU has {major}.{minor}"
    return None


def nearest(N: int, K: int, gpu: str) -> dict[str, Any]:
    """What was measured for a weight [N, K] or the nearest shape: N, K and the fields of Plan.

    An H200's table has what that of the GPU lacks.
    """
    own = _tuned(gpu)
    found = _tuned(_OTHERWISE) | own
    shape = min(found, key=lambda one: distance(one, (N, K)))
    if not own:
        say_once(f"there is no table of kernels for {gpu!r}; the one of an H200 is used.")
    if shape != (N, K):
        say_once(
            f"no table of kernels has linears of {N} x {K}: what is known of {shape[0]} x {shape[1]}, and guesses,"
            " stand in."
        )
        say_once(
            "`python -m verl_qerl tune --models DIR_OF_THE_MODEL` measures what the tables lack (with"
            " --tensor-parallel, if GPUs share the rollout)."
        )
    elif own and shape not in own:
        say_once(f"the table of kernels for {gpu!r} lacks linears of {N} x {K}; the one of an H200 is used.")
    return found[shape]


def distance(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Distance of two shapes [N, K]: factors of two in N and in K, added."""
    return sum(abs(math.log2(size / its)) for size, its in zip(one, other, strict=True))


def table_path(gpu: str) -> Path:
    """The path of the table that `tune` writes for a GPU; it is used before the one that ships."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # of no account: a name as any
    return cache / "verl_qerl" / _file_name(gpu)


def shipped_path(gpu: str) -> Path:
    """The path of a GPU's table in the package; there may be none."""
    return Path(__file__).parent / "tuned" / _file_name(gpu)


def _file_name(gpu: str) -> str:
    return f"{gpu.lower().replace(' ', '_')}.json"


@functools.cache
def _tuned(gpu: str) -> dict[tuple[int, int], dict[str, Any]]:
    """N and K -> row of a GPU: what the user measured, and what ships of other shapes."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for path in (table_path(gpu), shipped_path(gpu)):
        try:
            table = read_table(path) if path.exists() else {"rows": []}
        except OSError as error:  # the home directory of another account, as in containers
            say_once(f"{path} cannot be read ({error.strerror}) and is left out.")
            continue
        if table is None:
            say_once(
                f"{path} is cut short or of another version and left out: run `python -m verl_qerl tune` again, or"
                " delete it."
            )
            continue
        found = {(row["N"], row["K"]): row for row in table["rows"]} | found
    return found


def read_table(path: Path) -> dict[str, Any] | None:
    """What `tune` wrote, or None for a file that is no such table: cut short, or of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no text
        return None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _FIELDS for row in rows):
        return None
    return content
