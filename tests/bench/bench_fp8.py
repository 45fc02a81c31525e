"""From how many rows on FP8 arithmetic pays: microseconds of each linear of a model, by ways to multiply.

    python tests/bench/bench_fp8.py --out tests/bench/results/<gpu>/fp8.json [--models 7B 32B] [--rows 1 64 256]

ours: the packed weight; fp8: its copy in E4M3 from row 1 on; each with an adapter. bf16: cuBLAS over a dense weight,
as a merged model has it. Parts of fp8: both (activations quantized and X A^T, quantize without that) and product, with
the fastest launch; beside it the products of vLLM and torch without an adapter. More weights than the L2
cache holds are read in turn, in one CUDA graph. --install writes the launches where rollouts find them.
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

from verl_qerl.kernels.rollout import fp8_matmul
from verl_qerl.kernels.rollout.low_rank import quantize_rows
from verl_qerl.kernels.rollout.repacking import dequantize_repacked
from verl_qerl.vllm_plugin.weights import fp8_copy
from verl_qerl.vllm_plugin.weights.linear_ops import lora_linear_repacked

sys.path.insert(0, str(Path(__file__).parent))

import bench_dequantize
import bench_layer
import rollout_arms
import rollout_report

ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 8192)
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

    rows, of_rows, _ = quantize_rows(x)
    operands = [(rows, codes.t(), of_rows, scales) for codes, scales in (w["copy"] for w in made)]
    found["quantize"] = [partial(quantize_rows, x)] * len(made)
    found["both"] = [partial(quantize_rows, x, w["adapter"][0], slots) for w in made]
    found["vllm"] = [partial(ops.cutlass_scaled_mm, *each, torch.bfloat16) for each in operands]
    if len(x) > 1:  # of one row torch takes the scale for that of the whole tensor
        found["torch"] = [
            partial(torch._scaled_mm, a, b, of_a, of_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
            for a, b, of_a, of_b in operands
        ]
    return found


def choose(
    made: Sequence[dict[str, Any]], x: torch.Tensor, timer: bench_dequantize.Timer
) -> tuple[fp8_matmul.Launch, dict[str, float]]:
    """The fastest launch of the product with an adapter, and the microseconds of all."""
    rows, of_rows, _ = quantize_rows(x)
    times = {}
    for launch in fp8_matmul.candidates(len(x)):
        calls = []
        for w in made:
            a, b, members = w["adapter"]
            low = fp8_matmul.Low(torch.zeros(len(x), len(a), dtype=x.dtype, device=x.device), b, members)
            calls.append(partial(fp8_matmul.fp8_matmul, rows, of_rows, *w["copy"], None, low, launch))
        times[launch] = statistics.median(timer(calls)) * 1e6
    best = min(times, key=lambda launch: times[launch])
    return best, {" ".join(map(str, launch)): round(us, 2) for launch, us in times.items()}


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
                row = {"model": model, "linear": linear, "N": sum(members), "K": K, "rows": batch}
                if x.is_cuda:
                    launch, tried = choose(made, x, timer)
                    row |= {"launch": launch, "tried": tried}
                    fp8_copy.tuned_launch = lambda *_, launch=launch: launch
                us = {name: round(statistics.median(timer(calls)) * 1e6, 2) for name, calls in ways(made, x).items()}
                us |= {"product": min(row["tried"].values())} if x.is_cuda else {}
                told = "  ".join(f"{name} {time:.1f}" for name, time in us.items())
                print(f"{model} {linear:8} {batch:4} rows  {told}  {tuple(row.get('launch', ()))}")
                sys.stdout.flush()
                yield row | {"us": us}
            del made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--models", nargs="+", default=["7B"], choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--install", action="store_true", help="write the launches into the package")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    options = {"models": args.models, "rows": list(args.rows), "rank": bench_layer.RANK}
    head, rows = rollout_report.header(options), []
    timer, gpu = partial(bench_dequantize.graph_timer, repetitions=10), torch.cuda.get_device_name()
    for row in measure(args.models, args.rows, timer, gpu):
        rows.append(row)
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    if args.install:
        kept = [{name: row[name] for name in ("N", "K", "rows", "launch")} for row in rows]
        fp8_copy.tuned_path(gpu).write_text(json.dumps({**head, "rows": kept}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
