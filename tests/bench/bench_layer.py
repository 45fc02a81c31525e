"""A decode layer as a rollout launches it: microseconds, what an adapter adds, and what attention takes in it.

    python tests/bench/bench_layer.py --out tests/bench/results/<gpu>/layer.json [--models 7B 14B] [--rows 1 64 256]
        [--contexts 0 320]

RMSNorm, qkv, rotation (Qwen3: norms of heads too), attention over so many tokens (with 0, o takes the rotated q in its
place), o, RMSNorm, gate and up, SiLU, down: layers of random weights, more than the L2 cache holds, in one CUDA graph.
Each is timed with and without an adapter.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_dequantize
import result_file
import rollout_arms
import torch

from verl_qerl.kernels.rollout.attention import decode_attention
from verl_qerl.kernels.rollout.elementwise import add_rms_norm, silu_mul
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.rotation import rotate
from verl_qerl.vllm_plugin.weights.linear_ops import linear_repacked, lora_linear_repacked
from verl_qerl.vllm_plugin.weights.plans import make_plan

ARMS = {"without": False, "with an adapter": True}
ROWS = (1, 16, 32, 48, 64, 96, 128, 192, 256)
RANK, LAYERS, POSITIONS = 32, 8, 1024
PAGE = 16  # tokens, as vLLM has it on a GPU
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
        "plan": make_plan(N, K, gpu, math.gcd(128, *members)),
        "adapter": (a * K**-0.5, b, member_of_tile(members, device)),
    }


def make_layer(shape: rollout_arms.Shape, gpu: str, device: str) -> Tensors:
    """Linears, and weights of norms: of rows and of heads."""
    linears = {name: make_linear(*sizes, gpu, device) for name, sizes in parts(shape).items()}
    return linears | {
        "norm": torch.ones(shape.hidden, device=device),
        "heads": torch.ones(shape.head_dim, device=device),
    }


def run_layer(
    shape: rollout_arms.Shape, layer: Tensors, adapted: bool, inputs: Tensors, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, hidden] bf16, each: what the next layer takes."""

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        of = layer[name]
        weight = (x, of["words"], of["scale"], of["of_all"], None, of["plan"])
        if not adapted:
            return linear_repacked(*weight)
        return lora_linear_repacked(*weight, *of["adapter"], inputs["slots"], inputs["none_active"])

    x, residual = add_rms_norm(x, residual, layer["norm"], 1e-6)
    q, k, v = multiply("qkv", x).split(parts(shape)["qkv"][1], 1)
    places = (inputs["positions"], inputs["table"], shape.head_dim)
    if shape.family == "qwen3":
        q, k = rotate(q, k, *places, layer["heads"], layer["heads"], 1e-6)
    else:
        q, k = rotate(q, k, *places)
    if "cache" in layer:
        q = attend(shape, layer["cache"], inputs, q, k, v)
    x, residual = add_rms_norm(multiply("o", q), residual, layer["norm"], 1e-6)
    return multiply("down", silu_mul(multiply("gate_up", x))), residual


def attend(shape: rollout_arms.Shape, cache: torch.Tensor, inputs: Tensors, *qkv: torch.Tensor) -> torch.Tensor:
    """[rows, heads * head_dim] bf16: what attention makes of q, k and v."""
    out = torch.empty_like(qkv[0])
    q, k, v, heads = (x.unflatten(1, (-1, shape.head_dim)) for x in (*qkv, out))
    decode_attention(q, k, v, cache, inputs["lengths"], inputs["pages"], inputs["places"], shape.head_dim**-0.5, heads)
    return out


def make_cache(shape: rollout_arms.Shape, rows: int, context: int, device: str) -> Tensors:
    """A layer's, if there is a context."""
    if not context:
        return {}
    sizes = (rows * -(-context // PAGE), 2, PAGE, shape.kv_heads, shape.head_dim)
    return {"cache": torch.randn(sizes, dtype=torch.bfloat16, device=device)}


def make_inputs(shape: rollout_arms.Shape, rows: int, context: int, device: str) -> Tensors:
    """What layers take beside their weights and caches, and the first ones' x; pages are in random order."""
    columns = -(-context // PAGE)
    pages = torch.randperm(rows * columns, device=device).view(rows, columns).int()
    last = pages[:, -1].long() if columns else torch.zeros(rows, dtype=torch.int64, device=device)
    return {
        "lengths": torch.full((rows,), context, dtype=torch.int32, device=device),
        "pages": pages,
        "places": last * PAGE + (context - 1) % PAGE,
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
    models: Sequence[str],
    rows: Sequence[int],
    contexts: Sequence[int],
    timer: Callable[..., list[float]],
    gpu: str,
    device: str = "cuda",
) -> Iterator[dict[str, Any]]:
    """A row of the result file for each model, context, batch and arm."""
    for model in models:
        shape = rollout_arms.SHAPES[model]
        made = [make_layer(shape, gpu, device) for _ in range(LAYERS)]  # plans compile their kernels
        for context, batch in itertools.product(contexts, rows):
            layers = [layer | make_cache(shape, batch, context, device) for layer in made]
            inputs = make_inputs(shape, batch, context, device)
            for arm, adapted in ARMS.items():
                us = statistics.median(timer([functools.partial(run_layers, shape, layers, adapted, inputs)]))
                us = round(us / LAYERS * 1e6, 2)
                yield {"model": model, "rows": batch, "context": context, "arm": arm, "us": us}
                print(f"{model} {batch:4} rows  {context:5} tokens  {us:8.2f} us  {arm}", flush=True)
        del made, layers


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--models", nargs="+", default=["7B", "14B", "32B"], choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--contexts", nargs="+", type=int, default=[0], help="tokens of each sequence, the new one too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    options = {"models": args.models, "rows": list(args.rows), "contexts": args.contexts}
    head = result_file.header({**options, "rank": RANK, "layers": LAYERS})
    rows, gpu = [], torch.cuda.get_device_name()
    for row in measure(args.models, args.rows, args.contexts, bench_dequantize.graph_timer, gpu):
        rows.append(row)
        result_file.write(args.out, {**head, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
