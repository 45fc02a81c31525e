"""Which kernel multiplies by a packed linear, by the number of rows: plans, measured tables, humming.

Where the paths cross is measured (`python -m verl_qerl tune`). humming is a 4-bit tensor-core kernel that vLLM 0.24
depends on; it is compiled for the ranges of rows below.
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
from verl_qerl.kernels.tiled_launch import TOKENS, Launch, guess_launch, padded_rows
from verl_qerl.nvfp4.format import BLOCK_SIZE

logger = logging.getLogger(__name__)

# Largest row count of each range that humming gets a kernel for; its own table has about 40, each compiled at start.
_ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 176, 256, 512, 1024, 1 << 30)
_COMPUTE = json.dumps({"gemm_type": "dense"})


@dataclass(frozen=True)
class Plan:
    """How to multiply by a weight of one shape.

    Attributes:
        tiled_rows: Up to here `kernels.tiled_matmul`.
        launches: Its launches, by entries of its TOKENS.
        packed_rows: Up to here humming beats cuBLAS over a resident copy.
        decode_rows: From here on decoding and cuBLAS beat humming.
        layer_config: humming's description of the weight.
        tuning_config: humming's kernels, by ranges of rows.
    """

    tiled_rows: int
    launches: tuple[Launch, ...]
    packed_rows: int
    decode_rows: int
    layer_config: str
    tuning_config: str

    def launch(self, rows: int) -> Launch:
        """The launch of `kernels.tiled_matmul` for a batch, up to `tiled_rows`."""
        return self.launches[TOKENS.index(padded_rows(rows))]


PLANS: dict[str, Plan] = {}


def make_plan(N: int, K: int, gpu: str, normal_scales: bool = True) -> str:
    """Key of the plan for a weight [N, K] on a GPU, made on first use.

    Args:
        N: out_features.
        K: in_features.
        gpu: As CUDA names it.
        normal_scales: Whether every block scale is at least 2**-6, as our own kernels need.
    """
    key = f"{N}x{K}" if normal_scales else f"{N}x{K} with subnormal scales"
    if key not in PLANS:
        row = nearest(N, K, gpu)
        # The launch of another shape may not fill the GPU with this one.
        measured = row["launches"] if (row["N"], row["K"]) == (N, K) else {}
        launches = tuple(
            Launch(*measured[str(tokens)]) if str(tokens) in measured else guess_launch(N, K, tokens)
            for tokens in TOKENS
        )
        tiled_rows = row["tiled_rows"] if normal_scales else 0
        PLANS[key] = Plan(tiled_rows, launches, row["packed_rows"], row["decode_rows"], *_humming_configs(N, K))
        if tiled_rows:
            tiled_matmul.prepare(zip(TOKENS, launches, strict=True))
    return key


def humming_matmul(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, global_decode_scale: torch.Tensor, plan: str
) -> torch.Tensor:
    """X W^T by humming, on a GPU; arguments as of `tiled_ops.linear_tiled`."""
    chosen = PLANS[plan]
    return torch.ops.humming.humming_gemm(
        layer_config=chosen.layer_config,
        compute_config=_COMPUTE,
        tuning_config=chosen.tuning_config,
        inputs=x.contiguous(),
        weight=words,
        weight_scale=scale.view(torch.float8_e4m3fn),
        global_scale=global_decode_scale,
        locks=_locks(x.device),
    )


def why_not() -> str | None:
    """Why the kernel choice by rows cannot be used on this machine, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"it is measured on compute capability 9.0 only and this GPU has {major}.{minor}"
    try:
        import humming.ops  # noqa: F401  registers its operators
    except ImportError as error:
        return f"humming cannot be imported: {error}"
    return None


def nearest(N: int, K: int, gpu: str) -> dict[str, Any]:
    """What was measured for a weight [N, K] or the nearest shape: N, K and the fields of Plan but the last two."""
    table = _tuned(gpu)
    if not table:
        say_once(f"there is no table of kernels for {gpu!r}; the one of an H200 is used.")
        table = _tuned("NVIDIA H200")
    return min(table, key=lambda row: abs(math.log2(row["N"] / N)) + abs(math.log2(row["K"] / K)))


def table_path(gpu: str) -> Path:
    """Where `tune` writes the table of a GPU, which goes before the one that ships."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "verl_qerl" / _file_name(gpu)


def _file_name(gpu: str) -> str:
    return f"{gpu.lower().replace(' ', '_')}.json"


@functools.cache
def _tuned(gpu: str) -> list[dict[str, Any]]:
    for path in (table_path(gpu), Path(__file__).parent / "tuned" / _file_name(gpu)):
        if path.exists():
            return json.loads(path.read_text())["rows"]
    return []


def _humming_configs(N: int, K: int) -> tuple[str, str]:
    from humming import dtypes
    from humming.config import WeightScaleType
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingMethod
    from humming.schema import HummingWeightSchema
    from humming.tune import get_heuristics_config

    schema = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3,
        weight_scale_group_size=BLOCK_SIZE,
        weight_scale_type=WeightScaleType.GROUP_TENSOR,
    )
    meta = HummingMethod.prepare_layer_meta(
        layer=torch.nn.Module(), shape_n=N, shape_k=K, weight_schema=schema, torch_dtype=torch.bfloat16
    )
    ranges, below = [], 0
    for rows in _ROWS:
        config = get_heuristics_config(meta=meta, shape_m=min(rows, 8192), gemm_type="dense")
        ranges.append([below, rows, config])
        below = rows
    layer_config, tuning_config = meta.to_str(), json.dumps(ranges)
    HummingKernel.prepare_kernels(layer_config, _COMPUTE, tuning_config)  # compiles what is not cached on disk
    return layer_config, tuning_config


@functools.cache
def _locks(device: torch.device) -> torch.Tensor:
    # Scratch of humming, which leaves it as it found it; linears run one after the other.
    return torch.zeros(1024, dtype=torch.int32, device=device)


@functools.cache
def say_once(message: str) -> None:
    """Log a warning unless it was logged before."""
    logger.warning("verl_qerl: %s", message)
