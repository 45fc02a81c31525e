"""`python -m verl_qerl tune`: measure where the kernels of a rollout cross on this GPU."""

import argparse
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.record import write_whole
from verl_qerl.cli.tune.shapes import Shape, shapes_of
from verl_qerl.formats import DEFAULT_FORMAT
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.repacking import Repacked, repack
from verl_qerl.kernels.rollout.w4a16_launch import TOKENS, Launch, both_ways, launch_candidates
from verl_qerl.kernels.rollout.w4a16_matmul import Adapter, can_fuse, prepare, w4a16_matmul
from verl_qerl.vllm_plugin.weights.linear_ops import lora_linear_repacked
from verl_qerl.vllm_plugin.weights.plans import PLANS, Plan, read_table, table_path, why_not

ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 176, 256, 512, 1024, 2048, 4096, 8192)
TRIED = 12  # launches of w4a16_matmul, the most promising ones, each with both ways to make X A^T
_REPLAYS = 5  # of which the best is taken
_RANK = 32  # of the adapter with which they are compared
_CACHE_BYTES = 400 << 20  # read between two uses of a weight, several times the L2 cache of an H200


def run(args: argparse.Namespace) -> int:
    """Measure, write the table and print it.

    The table is written after every linear, so that nothing measured is lost, and keeps those of other models.

    Raises:
        ValueError: The machine has no GPU on which there is a choice, `--out` is no table of this GPU, or a model is
            not known.
    """
    reason = why_not()
    if reason:
        raise ValueError(f"nothing to measure: {reason}. A Hopper GPU with vLLM is accepted. Run it there.")
    shapes = shapes_of(args.models, args.tensor_parallel)
    gpu = torch.cuda.get_device_name()
    path = args.out or table_path(gpu)
    rows = _kept(path, gpu, shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    for N, K in shapes:
        rows.append(measure(N, K))
        print(describe(rows[-1]), flush=True)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = {"gpu": gpu, "torch": torch.__version__, "time": now, "rows": rows}
        write_whole(path, content)  # a rollout that starts meanwhile reads a whole table
    print(f"written to {path}")
    return 0


def _kept(path: Path, gpu: str, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """What a table has of other linears; nothing of one that a rollout would leave out.

    Raises:
        ValueError: It is another GPU's; or it is no table and lies where no rollout looks.
    """
    table = read_table(path) if path.exists() else {"rows": []}
    if table is None and path == table_path(gpu):
        return []  # a rollout that finds it asks for this command
    if table is None or table.get("gpu", gpu) != gpu:
        found = f"has what was measured on {table['gpu']}" if table else "is no table of this command"
        raise ValueError(f"{path} {found}. A table of this GPU, {gpu}, or a new file is accepted. Give another --out.")
    return [row for row in table["rows"] if (row["N"], row["K"]) not in shapes]


def measure(N: int, K: int) -> dict[str, Any]:
    """Times of every path for a weight [N, K] with an adapter, and where they cross.

    Returns:
        The fields of vllm_plugin.weights.plans.Plan, and `times`, microseconds by rows.
    """
    packed = tiled_copies(N, K)
    tried = {
        tokens: [way for launch in fusing(N, K, tokens)[:TRIED] for way in both_ways(tokens, launch)]
        for tokens in TOKENS
    }
    prepare((tokens, launch) for tokens, found in tried.items() for launch in found)
    launches = {
        str(tokens): min(found, key=partial(time_with_adapter, tokens, packed)) for tokens, found in tried.items()
    }
    times = []
    for rows in ROWS:
        x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
        calls = paths(x, packed, tuple(launches.values()))
        times.append({"rows": rows} | {name: time_us(each) for name, each in calls.items()})
    return {"N": N, "K": K, "decode_rows": crossing(times), "launches": launches, "times": times}


def tiled_copies(N: int, K: int) -> list[Repacked]:
    """A random weight [N, K] on the GPU as often as the L2 cache cannot hold it."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = [repack(DEFAULT_FORMAT.quantize(weight.to("cuda")))]
    words, scale, scale_of_all = packed[0]
    clones = range(_CACHE_BYTES // (N * K * 9 // 16))
    return packed + [(words.clone(), scale.clone(), scale_of_all) for _ in clones]


def paths(
    x: torch.Tensor,
    packed: Sequence[tuple[torch.Tensor, ...]],
    launches: tuple[Launch, ...],
) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """What a rollout would run, each path over every copy of a weight.

    Args:
        packed: Tiled copies of a weight, as `lora_linear_repacked` takes them.
    """
    never, always = "tune: cuBLAS", "tune: tiled"
    PLANS[never], PLANS[always] = Plan(launches, 0), Plan(launches, 1 << 30)
    adapter = (*_adapter(x, packed[0][1].shape[1]), torch.tensor([False]))
    return {
        "tiled_us": [partial(lora_linear_repacked, x, *tensors, None, always, *adapter) for tensors in packed],
        "decoded_us": [partial(lora_linear_repacked, x, *tensors, None, never, *adapter) for tensors in packed],
    }


def fusing(N: int, K: int, tokens: int) -> list[Launch]:
    """Launches that take an adapter too, the most promising first: others cost a rollout with one two more kernels."""
    adapter = _adapter(torch.empty(0, K, device="meta"), N)  # its shapes alone count
    return [launch for launch in launch_candidates(N, K, tokens) if can_fuse(*adapter[:3], launch)]


def _adapter(x: torch.Tensor, N: int) -> Adapter:
    """One on a linear of one member, that all rows of x have."""
    a, b = (torch.randn(shape, device=x.device).bfloat16() for shape in ((_RANK, x.shape[1]), (N, _RANK)))
    slots = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return Adapter(a, b, member_of_tile((N,), x.device), slots)


def time_with_adapter(tokens: int, packed: Sequence[tuple[torch.Tensor, ...]], launch: Launch) -> float:
    """Microseconds of `w4a16_matmul` of so many rows with an adapter, over the copies of a weight."""
    scale = packed[0][1]
    x = torch.randn(tokens, scale.shape[0] * 16, device="cuda").bfloat16()
    adapter = _adapter(x, scale.shape[1])
    return time_us([partial(w4a16_matmul, x, *tensors, None, adapter, launch) for tensors in packed])


def crossing(times: Sequence[dict[str, float]]) -> int:
    """From how many rows on decoding is the fastest for good: `decode_rows` of vllm_plugin.weights.plans.Plan.

    Args:
        times: Microseconds by rows, ascending.
    """
    found = 1 << 30
    for entry in reversed(times):
        if entry["decoded_us"] > entry["tiled_us"]:
            break
        found = int(entry["rows"])
    return found


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one call, the best of several replays of a CUDA graph over all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return round(best * 1e3 / len(calls), 2)


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    times = "  ".join(f"{entry['rows']}: {entry['tiled_us']:.0f}/{entry['decoded_us']:.0f}" for entry in row["times"])
    return f"{row['N']} x {row['K']}: decoding from {row['decode_rows']} rows; us packed/decoded  {times}"
