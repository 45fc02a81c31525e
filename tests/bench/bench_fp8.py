"""From how many rows on FP8 arithmetic pays: microseconds of each linear of a model, by ways to multiply.

    python tests/bench/bench_fp8.py --out tests/bench/results/<gpu>/fp8.json [--models 7B 32B] [--rows 1 64 256]

ours: the packed weight; fp8: its copy in E4M3 from row 1 on; each with an adapter. bf16: cuBLAS over a dense weight,
as a merged model has it. Parts of fp8: quantize (of the activations) and product; torch: its product by torch's kernel.
More weights than the L2 cache holds are read in turn, in one CUDA graph.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_qerl.kernels.rollout.repacking import dequantize_repacked
from verl_qerl.vllm_plugin.weights import fp8_copy
from verl_qerl.vllm_plugin.weights.linear_ops import lora_linear_repacked

sys.path.insert(0, str(Path(__file__).parent))

import bench_dequantize
import bench_layer
import rollout_arms
import rollout_report

ROWS = (1, 16, 32, 48, 64, 96, 128, 192, 256, 512)
READ_BYTES = 256 << 20  # of packed weights, several times an L2 cache
MOST_COPIES = 16

Calls = list[Callable[[], object]]


def weights(K: int, members: tuple[int, ...], gpu: str, device: str) -> list[dict[str, Any]]:
    """A linear as often as the L2 cache cannot hold it: packed, in E4M3 and in bf16."""
    number = min(MOST_COPIES, max(2, -(-READ_BYTES // (sum(members) * K * 9 // 16)))) if device == "cuda" else 2
    made = []
    for _ in range(number):
        linear = bench_layer.make_linear(K, members, gpu, device)
        packed = linear["words"], linear["scale"], linear["of_all"]
        copies = {"copy": fp8_copy.make_copy(*packed), "dense": dequantize_repacked(*packed)}
        made.append(linear | {"packed": packed} | copies)
    return made


def ways(made: Sequence[dict[str, Any]], x: torch.Tensor) -> dict[str, Calls]:
    """Each way over all the weights; x [M, K] bf16."""
    slots = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    rest = (slots, torch.tensor([False]))
    found: dict[str, Calls] = {
        name: [
            partial(lora_linear_repacked, x, *w["packed"], w["copy"] * copied, None, w["plan"], *w["adapter"], *rest)
            for w in made
        ]
        for name, copied in (("ours", 0), ("fp8", 1))
    }
    found["bf16"] = [partial(torch.nn.functional.linear, x, w["dense"]) for w in made]
    if not x.is_cuda:
        return found
    from vllm import _custom_ops as ops

    quantize = partial(ops.scaled_fp8_quant, x, use_per_token_if_dynamic=True)
    rows, of_rows = quantize()
    operands = [(rows, codes.t(), of_rows, scales) for codes, scales in (w["copy"] for w in made)]
    found["quantize"] = [quantize] * len(made)
    found["product"] = [partial(ops.cutlass_scaled_mm, *each, torch.bfloat16) for each in operands]
    if len(x) > 1:  # of one row torch takes the scale for that of the whole tensor
        found["torch"] = [
            partial(torch._scaled_mm, a, b, of_a, of_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
            for a, b, of_a, of_b in operands
        ]
    return found


def measure(
    models: Sequence[str], rows: Sequence[int], timer: bench_dequantize.Timer, gpu: str, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """A row of the result file for each linear and batch."""
    fp8_copy.FEWEST_ROWS = 1
    for model in models:
        for linear, (K, members) in bench_layer.parts(rollout_arms.SHAPES[model]).items():
            made = weights(K, members, gpu, device)  # plans compile their kernels
            for batch in rows:
                x = torch.randn(batch, K, device=device).bfloat16()
                us = {name: round(statistics.median(timer(calls)) * 1e6, 2) for name, calls in ways(made, x).items()}
                print(f"{model} {linear:8} {batch:4} rows  " + "  ".join(f"{n} {t:.1f}" for n, t in us.items()))
                sys.stdout.flush()
                yield {"model": model, "linear": linear, "rows": batch, "us": us}
            del made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--models", nargs="+", default=["7B"], choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    options = {"models": args.models, "rows": list(args.rows), "rank": bench_layer.RANK}
    head, rows = rollout_report.header(options), []
    timer = partial(bench_dequantize.graph_timer, repetitions=10)
    for row in measure(args.models, args.rows, timer, torch.cuda.get_device_name()):
        rows.append(row)
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
