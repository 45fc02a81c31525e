"""Bandwidth of the NVFP4 dequantization kernel against the same GPU's copy.

    python tests/bench/bench_dequantize.py --out tests/bench/results/<gpu>/dequantize.json [--tune]

The kernel's tests run first; nothing is timed unless they pass. Each shape is decoded from several copies of the weight
into as many outputs, together larger than the L2 cache, within one CUDA graph: what is timed is the kernel alone, from
and to memory.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import result_file
import rollout_arms
import torch

from verl_qerl.kernels.rollout.repacking import decode

ROOT = Path(__file__).parents[2]
GATE = ROOT / "tests" / "kernels" / "actor" / "test_dequantize.py"
kernel = importlib.import_module(
    "verl_qerl.kernels.actor.dequantize"
)  # its namesake, the function, hides it in the package


def linears_of(shape: rollout_arms.Shape) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of what the actor decodes one by one, and of what vLLM holds fused."""
    q, k, up, down = (shape.linears[f"{name}_proj"] for name in ("self_attn.q", "self_attn.k", "mlp.up", "mlp.down"))
    fused = {"qkv": (q[0] + 2 * k[0], shape.hidden), "gate_up": (2 * up[0], shape.hidden)}
    return {"q, o": q, "k, v": k, "gate, up": up, "down": down} | fused


SHAPES = {name.lower(): linears_of(rollout_arms.SHAPES[name]) for name in ("7B", "32B")}
TUNE = [
    (1, 64, 4),
    (1, 128, 4),
    (1, 256, 4),
    (2, 64, 2),
    (2, 64, 4),
    (4, 16, 4),
    (4, 32, 4),
    (4, 64, 4),
    (4, 64, 8),
    (4, 128, 8),
    (8, 32, 4),
    (8, 64, 8),
    (16, 16, 4),
    (16, 32, 8),
]
TUNE_SHAPES = [("7b", "q, o"), ("7b", "k, v"), ("7b", "gate, up"), ("32b", "gate, up"), ("32b", "down")]
WORKING_SET_BYTES = 2 << 30  # forty times the L2 of an H200, and long against the gap between two replays
COPY_BYTES = 2 << 30

Timer = Callable[[list[Callable[[], object]]], list[float]]  # calls -> seconds for one of them, of each repetition


def traffic_bytes(N: int, K: int) -> int:
    """Read: a code of half a byte and a sixteenth of a scale for each weight. Written: bfloat16."""
    return N * K // 2 + N * K // 16 + 2 * N * K


def summary(seconds: list[float], num_bytes: int, copy_gb_s: float | None = None) -> dict[str, float]:
    ordered = torch.tensor(seconds, dtype=torch.float64)
    p20, median, p80 = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    row = {"median_us": median * 1e6, "p20_us": p20 * 1e6, "p80_us": p80 * 1e6, "gb_s": num_bytes / median / 1e9}
    if copy_gb_s is not None:
        row["fraction_of_copy"] = row["gb_s"] / copy_gb_s
    return {name: float(f"{value:.4g}") for name, value in row.items()}


def graph_timer(calls: list[Callable[[], object]], repetitions: int = 50) -> list[float]:
    """Seconds a call, from replays of one CUDA graph that makes all calls; their results stay distinct in memory."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(5):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    del kept, graph
    torch.cuda.empty_cache()  # a graph's memory serves no other graph
    return [start.elapsed_time(end) / 1e3 / len(calls) for start, end in pairwise(events)]


def measure_copy(timer: Timer, device: str, num_bytes: int) -> dict[str, float]:
    """A kernel that reads and writes every byte once; a copy within a graph would go to the slower copy engine.

    As many buffers as the kernel's own measurement has, so that a copy of one shape's size starts from memory as well.
    """
    elements = max(num_bytes // 8, 1)
    num_copies = max(2, -(-WORKING_SET_BYTES // num_bytes)) if device == "cuda" else 2
    sources = [torch.randint(2**31 - 1, (elements,), dtype=torch.int32, device=device) for _ in range(num_copies)]
    return summary(timer([partial(torch.bitwise_not, source) for source in sources]), elements * 8)


def measure_shape(N: int, K: int, timer: Timer, device: str, copy_gb_s: float) -> dict[str, float]:
    num_copies = max(2, -(-WORKING_SET_BYTES // traffic_bytes(N, K)))
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(8, 127, (N, K // 16), dtype=torch.uint8, device=device)  # the normal E4M3 numbers
    decode_scale = torch.tensor(2.0**-12, device=device)
    copies = [(codes.clone(), scale.clone()) for _ in range(num_copies)]
    calls = [partial(kernel.dequantize_nvfp4, *copy, decode_scale, torch.bfloat16) for copy in copies]
    row = summary(timer(calls), traffic_bytes(N, K), copy_gb_s)
    del copies, calls
    # A small weight is over before the memory system is busy: a copy of its size says how much of that is ours.
    same_size = measure_copy(timer, device, traffic_bytes(N, K))["gb_s"]
    return {**row, "fraction_of_same_size_copy": float(f"{row['gb_s'] / same_size:.4g}")}


def measure_tiled(N: int, K: int, timer: Timer, device: str, copy_gb_s: float) -> dict[str, float]:
    """The same weight in the rollout's layout, as the actor decodes it under share_base: the first half of a stack."""
    num_copies = max(2, -(-WORKING_SET_BYTES // traffic_bytes(N, K)))
    words = torch.randint(2**31 - 1, (K // 16, 4 * N), dtype=torch.int32, device=device)
    scale = torch.randint(8, 127, (K // 16, 2 * N), dtype=torch.uint8, device=device)
    decode_scale = torch.full((1,), 2.0**-12, device=device)
    copies = [(words.clone()[:, : 2 * N], scale.clone()[:, :N]) for _ in range(num_copies)]
    calls = [partial(decode, *copy, decode_scale) for copy in copies]
    return {f"tiled_{name}": value for name, value in summary(timer(calls), traffic_bytes(N, K), copy_gb_s).items()}


def measure_all(timer: Timer, device: str, copy_gb_s: float) -> list[dict]:
    return [
        {
            **{"model": model, "linear": linear, "N": N, "K": K},
            **measure_shape(N, K, timer, device, copy_gb_s),
            **measure_tiled(N, K, timer, device, copy_gb_s),
        }
        for model, shapes in SHAPES.items()
        for linear, (N, K) in shapes.items()
    ]


def tune(timer: Timer, device: str, copy_gb_s: float) -> list[dict]:
    """Fraction of the copy of every candidate on TUNE_SHAPES, best worst case first; the kernel's own is put back."""
    chosen = kernel._TILES
    rows = []
    try:
        for candidate in TUNE:
            kernel._TILES = (candidate,)
            fractions = {
                f"{model} {linear}": measure_shape(*SHAPES[model][linear], timer, device, copy_gb_s)["fraction_of_copy"]
                for model, linear in TUNE_SHAPES
            }
            parts = dict(zip(("rows", "blocks", "warps"), candidate, strict=True))
            rows.append({**parts, "worst": min(fractions.values()), **fractions})
    finally:
        kernel._TILES = chosen
    return sorted(rows, key=lambda row: -row["worst"])


def gate_passes() -> bool:
    """Whether the kernel's tests pass on this GPU; skipped ones do not count as passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GATE)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        print(result.stdout[-4000:], result.stderr[-2000:])
    return result.returncode == 0 and " passed" in result.stdout and " skipped" not in result.stdout


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tune", action="store_true", help="also time other tile sizes")
    return parser


def show(report: dict) -> None:
    print(f"{report['gpu']}, copy {report['copy']['gb_s']:.0f} GB/s")
    for row in report["shapes"]:
        name = f"{row['model']} {row['linear']} {row['N']}x{row['K']}"
        print(
            f"{name:32s} {row['median_us']:8.1f} us {row['gb_s']:7.0f} GB/s {row['fraction_of_copy']:6.1%} of copy, "
            f"{row['fraction_of_same_size_copy']:6.1%} of one of its size, tiled {row['tiled_median_us']:8.1f} us"
        )
    for row in report.get("tune", []):
        print(f"rows {row['rows']:3d} blocks {row['blocks']:4d} warps {row['warps']} worst {row['worst']:6.1%} of copy")


def main(argv: list[str] | None = None, timer: Timer = graph_timer, device: str = "cuda") -> int:
    args = build_parser().parse_args(argv)
    if not gate_passes():
        print(f"{GATE.relative_to(ROOT)} did not pass on this machine: nothing is timed.")
        return 1
    report = result_file.header({"tune": args.tune})
    report |= {"op": "dequantize_nvfp4", "copy": measure_copy(timer, device, COPY_BYTES)}
    report["tiles"] = [dict(zip(("rows", "blocks", "warps"), tile, strict=True)) for tile in kernel._TILES]
    report["shapes"] = measure_all(timer, device, report["copy"]["gb_s"])
    if args.tune:
        report["tune"] = tune(timer, device, report["copy"]["gb_s"])
    result_file.write(args.out, report)
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
