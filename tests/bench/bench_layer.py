"""What lies around attention in a decode layer, as a rollout launches it: microseconds, and what an adapter adds.

    python tests/bench/bench_layer.py --out tests/bench/results/<gpu>/layer.json [--models 7B 14B] [--rows 1 64 256]

RMSNorm, qkv, rotation, o (of the rotated q, in the place of what attention makes of it), RMSNorm, gate and up, SiLU,
down: layers of random weights, more than the L2 cache holds, in one CUDA graph. Each is timed with and without an
adapter.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_qerl.kernels.elementwise import add_rms_norm, rotate, silu_mul
from verl_qerl.kernels.lora import member_of_tile
from verl_qerl.vllm_plugin.plans import make_plan
from verl_qerl.vllm_plugin.tiled_ops import linear_tiled, lora_linear_tiled

sys.path.insert(0, str(Path(__file__).parent))

import bench_dequantize
import rollout_arms
import rollout_report

ARMS = {"without": False, "with an adapter": True}
ROWS = (1, 16, 32, 48, 64, 96, 128, 192, 256)
RANK, LAYERS, POSITIONS = 32, 8, 1024
Tensors = dict[str, Any]


def parts(shape: rollout_arms.Shape) -> dict[str, tuple[int, tuple[int, ...]]]:
    """K and the members' columns of each fused linear."""
    of = {name.split(".")[1][: -len("_proj")]: size for name, size in shape.linears.items()}
    return {
        "qkv": (of["q"][1], (of["q"][0], of["k"][0], of["v"][0])),
        "o": (of["o"][1], of["o"][:1]),
        "gate_up": (of["gate"][1], (of["gate"][0], of["up"][0])),
        "down": (of["down"][1], of["down"][:1]),
    }


def make_linear(K: int, members: tuple[int, ...], gpu: str, device: str) -> Tensors:
    """Weight, plan and adapter; the bytes of a weight are as good as any that a quantizer makes."""
    N = sum(members)
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((len(members) * RANK, K), (N, RANK)))
    return {
        "words": torch.randint(-(2**31), 2**31, (K // 16, 2 * N), dtype=torch.int32, device=device),
        "scale": torch.randint(8, 127, (K // 16, N), dtype=torch.uint8, device=device),
        "of_all": torch.full((1,), 2.0**-20, device=device),
        "plan": make_plan(N, K, gpu),
        "adapter": (a * K**-0.5, b, member_of_tile(members, device)),
    }


def make_layer(shape: rollout_arms.Shape, gpu: str, device: str) -> Tensors:
    """Linears, and the weight of both norms."""
    linears = {name: make_linear(*sizes, gpu, device) for name, sizes in parts(shape).items()}
    return linears | {"norm": torch.ones(shape.hidden, device=device)}


def run_layer(
    shape: rollout_arms.Shape, layer: Tensors, adapted: bool, inputs: Tensors, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, hidden] bf16, each: what the next layer takes."""

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        of = layer[name]
        weight = (x, of["words"], of["scale"], of["of_all"], None, None, of["plan"])
        if not adapted:
            return linear_tiled(*weight)
        return lora_linear_tiled(*weight, *of["adapter"], inputs["slots"], inputs["none_active"])

    x, residual = add_rms_norm(x, residual, layer["norm"], 1e-6)
    q, k, _ = multiply("qkv", x).split(parts(shape)["qkv"][1], 1)
    q, _ = rotate(q, k, inputs["positions"], inputs["table"], shape.head_dim)
    x, residual = add_rms_norm(multiply("o", q), residual, layer["norm"], 1e-6)
    return multiply("down", silu_mul(multiply("gate_up", x))), residual


def make_inputs(shape: rollout_arms.Shape, rows: int, device: str) -> Tensors:
    """What layers take beside their weights, and the first ones' x."""
    return {
        "slots": torch.zeros(rows, dtype=torch.int64, device=device),
        "none_active": torch.tensor([False]),
        "positions": torch.arange(rows, device=device) % POSITIONS,
        "table": torch.randn(POSITIONS, shape.head_dim, device=device).bfloat16(),
        "x": torch.randn(rows, shape.hidden, device=device).bfloat16(),
    }


def run_layers(shape: rollout_arms.Shape, layers: Sequence[Tensors], adapted: bool, inputs: Tensors) -> torch.Tensor:
    """One after the other."""
    x = residual = inputs["x"]
    for layer in layers:
        x, residual = run_layer(shape, layer, adapted, inputs, x, residual)
    return x


def measure(
    models: Sequence[str], rows: Sequence[int], timer: Callable[..., list[float]], gpu: str, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """A row of the result file for each model, batch and arm."""
    for model in models:
        shape = rollout_arms.SHAPES[model]
        layers = [make_layer(shape, gpu, device) for _ in range(LAYERS)]  # plans compile their kernels
        for arm, adapted in ARMS.items():
            for batch in rows:
                inputs = make_inputs(shape, batch, device)
                us = statistics.median(timer([functools.partial(run_layers, shape, layers, adapted, inputs)]))
                yield {"model": model, "rows": batch, "arm": arm, "us": round(us / LAYERS * 1e6, 2)}
                print(f"{model} {batch:4} rows  {us / LAYERS * 1e6:8.2f} us  {arm}", flush=True)
        del layers


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--models", nargs="+", default=["7B", "14B", "32B"], choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    head = rollout_report.header({"models": args.models, "rows": list(args.rows), "rank": RANK, "layers": LAYERS})
    rows = []
    for row in measure(args.models, args.rows, bench_dequantize.graph_timer, torch.cuda.get_device_name()):
        rows.append(row)
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
