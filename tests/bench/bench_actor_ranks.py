"""Training passes of the LoRA actor under FSDP2 on several GPUs: packed base replicated, sharded, and bf16 sharded.

    torchrun --nproc-per-node 2 tests/bench/bench_actor_ranks.py --out tests/bench/results/<gpu>/actor_ranks.json

FSDP2 as verl sets it up (each layer, bf16 over float32 adapters, gradient checkpointing), the same tokens on each rank
in every arm. Rows are added to the file, so that runs on 1, 2 and 4 GPUs make one table. The packed arms must give the
same gradients bit for bit, on a few tokens and with an attention whose backward pass adds in a fixed order; a row says
whether they did, how far apart the farthest are, and whether a second pass of the same model gives the same bits.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import actor_models as models
import bench_actor as bench
import result_file
import torch
import torch.distributed as dist
import torch.nn as nn
from qerl_testing import rms_error_ratio
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.sharded_linear import ShardedNVFP4Linear

# name -> (arm of bench_actor, the class of its packed linears)
ARMS = {
    "bf16_sharded": ("bf16_peft", NVFP4Linear),
    "nvfp4_replicated": ("nvfp4_fused", NVFP4Linear),
    "nvfp4_sharded": ("nvfp4_fused", ShardedNVFP4Linear),
}


def build(base: Any, name: str, device: str) -> nn.Module:
    """The model of an arm under FSDP2."""
    arm, kind = ARMS[name]
    model = models.build(base, models.ARMS[arm], device, kind)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    stack = models.stack_of(model)
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(stack, mesh=mesh, mp_policy=policy)
    return model


def training_pass(model: nn.Module, x: torch.Tensor) -> None:
    bench.forward(model, x).float().square().mean().backward()


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one pass, whole, on the CPU; the same each time."""
    with sdpa_kernel(SDPBackend.MATH):
        training_pass(model, x)
    found = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(grad, other[key]) for key, grad in one.items())


def measure(model: nn.Module, x: torch.Tensor, repetitions: int) -> dict[str, float]:
    """Seconds of a pass, the longest of all ranks, medians; memory of this rank."""
    on_gpu, seconds = x.is_cuda, []
    held = torch.cuda.memory_allocated() / 2**30 if on_gpu else 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        training_pass(model, x)
        if on_gpu:
            torch.cuda.synchronize()
        taken = torch.tensor(time.perf_counter() - start, device=x.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(taken.item())
        model.zero_grad()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    step = statistics.median(seconds[1:])
    tokens = x.shape[0] * x.shape[1] * dist.get_world_size()
    numbers = {"step_s": step, "tokens_per_s": tokens / step, "held_gib": held, "peak_gib": peak}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


def run(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    rank, world, rows = dist.get_rank(), dist.get_world_size(), []
    for shape in args.shapes:
        # On the host, so that an arm holds its own copy and nothing else.
        base = models.draw_base(shape, args.layers or models.SHAPES[shape].layers, device).to("cpu")
        x = bench.embeddings(shape, args.tokens, device) * (1 + rank)
        x.requires_grad_()
        expected: dict[str, torch.Tensor] | None = None
        for name in args.arms:
            model = build(base.to(device), name, device)
            row: dict[str, Any] = {"arm": name, "model": shape, "gpus": world, "tokens": args.tokens}
            row["layers"] = base.layers
            if name.startswith("nvfp4"):
                few = x[:1, : bench.GATE_TOKENS].detach().requires_grad_()
                found, again = gradients(model, few), gradients(model, few)
                expected = expected or found
                row["repeats"], row["same_bits"] = same_bits(found, again), same_bits(expected, found)
                row["gradient_error"] = max(rms_error_ratio(found[key], grad) for key, grad in expected.items())
            rows.append(row | measure(model, x, args.repetitions))
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
            del model
            bench.free()
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows are added to those it has")
    parser.add_argument("--shapes", nargs="+", default=["7b", "32b"], choices=list(models.SHAPES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, on each rank")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rows = run(args, device)
    if dist.get_rank() == 0:
        before = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
        result_file.write(args.out, result_file.header({}) | {"rows": [*before, *rows]})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
