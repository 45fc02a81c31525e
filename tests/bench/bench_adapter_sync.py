"""How long a new adapter takes from the actor into the rollout, ours beside verl's, and what sleep and waking cost.

    python tests/bench/bench_adapter_sync.py --out FILE.json --model 7B --rank 32
    python tests/bench/bench_adapter_sync.py --out FILE.json --model 7B --rank 32

Two processes on one GPU, as in a run: an actor that holds the adapter in float32 under FSDP2, and a vLLM engine with
our worker extension (dummy weights, no CUDA graphs). Timed is what happens between them: gathering (ours with a
checksum), verl's transfer (ours with its comparison), and writing into vLLM's buffers, of which `read_back` is the
comparison of what they hold then. Ray's calls and the rest of a step are not in it; they are in a run's
`timing_s/update_weights`.
Exit code 1 when the engine's buffers do not hold what was sent.
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import host_time
import result_file
import rollout_arms

JOB = f"bench-{os.getpid()}"
SCALING = 2  # lora_alpha / r


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="7B", choices=list(rollout_arms.SHAPES))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=256, help="update_weights_bucket_megabytes")
    parser.add_argument("--lora", default="single", choices=["single", "stock"], help="kernels of the rollout")
    args = parser.parse_args(arguments)
    os.environ |= {"VERL_RAY_JOB_ID": JOB, "VERL_REPLICA_RANK": "0"}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    ours, theirs = mp.get_context("spawn").Pipe()
    actor = mp.get_context("spawn").Process(
        target=run_actor, args=(theirs, args.model, args.rank, args.bucket_mb, JOB), daemon=True
    )
    actor.start()
    options = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    result = result_file.header(options) | measure(args, ours)
    actor.kill()
    result_file.write(args.out, result)
    print(json.dumps({name: result[name] for name in ("adapter_mib", "ms", "sleep_s", "correct")}, indent=1))
    return int(not result["correct"])


def handle(job: str) -> str:
    """Where verl's two sides meet."""
    return f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock"


def adapter_shapes(shape: Any, rank: int) -> dict[str, tuple[int, int]]:
    """Names of PEFT -> sizes."""
    found = {}
    for layer in range(shape.layers):
        for name, (rows, columns) in shape.linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            found[f"{prefix}.lora_A.weight"], found[f"{prefix}.lora_B.weight"] = (rank, columns), (rows, rank)
    return found


def run_actor(pipe: Connection, model: str, rank: int, bucket_mb: int, job: str) -> None:
    """The other process: sends its adapter whenever it is told how."""
    import asyncio

    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.fsdp import fully_shard
    from verl.utils.device import get_device_name, get_torch_device, is_support_ipc
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from verl_qerl.verl_plugin.weight_sync.flat_adapter import FlatAdapter, adapter_checksum, pieces

    device = torch.device(get_device_name())
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/store",
        rank=0,
        world_size=1,
    )
    shapes = adapter_shapes(rollout_arms.SHAPES[model], rank)
    module = nn.Module()
    for name, size in shapes.items():
        *path, leaf = name.split(".")
        owner = module
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(torch.empty(size, device=device)))
    for layer in module.get_submodule("base_model.model.model.layers").children():
        fully_shard(layer)
    fully_shard(module)
    flat = FlatAdapter(module, {name: name for name in shapes}, device)

    pipe.send("ready")
    while True:
        arm, seed = pipe.recv()
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):
                parameter.fill_(value_of(seed, index))
        get_torch_device().empty_cache()  # as verl does before a sync
        host_time.synchronize()
        began = time.perf_counter()
        checksum = None
        if arm == "ours":
            whole = flat.gather()
            checksum, weights = adapter_checksum(whole), list(pieces(whole))
            del whole
        else:  # collect_lora_params
            weights = [(name, one.full_tensor().detach().cpu()) for name, one in module.named_parameters()]
        host_time.synchronize()
        pipe.send((flat.layout, checksum, time.perf_counter() - began))
        sender = BucketedWeightSender(handle(job), bucket_mb, use_shm=not is_support_ipc())
        asyncio.run(sender.async_send_weights(iter(weights)))
        del weights
        pipe.send("sent")


def value_of(seed: int, index: int) -> float:
    """What a tensor is filled with: its own number in bf16."""
    return (seed * 64 + index % 64 + 1) / 256


def measure(args: argparse.Namespace, actor: Connection) -> dict[str, Any]:
    """Everything of the result file but its header."""
    import torch
    import vllm

    from verl_qerl.vllm_plugin import register

    register()
    rollout_arms.register_dummy_nvfp4()
    cuda = torch.cuda.is_available()
    shape = rollout_arms.SHAPES[args.model]
    work = Path(tempfile.mkdtemp())
    additional = {"lora": args.lora}
    llm = vllm.LLM(
        model=str(rollout_arms.write_model(work / "model", shape, packed=True)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format=rollout_arms.DUMMY_NVFP4,
        quantization=rollout_arms.OURS,
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=(16 << 30) if cuda else (1 << 26),
        enforce_eager=True,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=max(8, args.rank),
        enable_sleep_mode=cuda,
        worker_extension_cls="verl_qerl.verl_plugin.weight_sync.worker_extension.WorkerExtension",
        additional_config={"verl_qerl": additional},
    )
    assert actor.recv() == "ready"
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], "verl": []}
    correct = True
    for seed in range(args.repeats):
        for arm, found in rounds.items():
            actor.send((arm, seed))
            layout, checksum, gather = actor.recv()
            time.sleep(0.02)  # Ray's call takes some ms: the sender listens before the receiver comes, as here
            config = {"peft_type": "LORA", "r": args.rank, "lora_alpha": SCALING * args.rank}
            config["target_modules"] = sorted({name.rpartition(".")[2] for name in shape.linears})
            seconds = llm.collective_rpc(receive, args=(arm, config, layout, checksum))[0]
            assert actor.recv() == "sent"
            found.append({"gather": gather, **seconds, "total": gather + seconds["total"]})
            correct = correct and llm.collective_rpc(holds, args=(seed, len(layout) // 2))[0]
    numel = sum(rows * columns for rows, columns in adapter_shapes(shape, args.rank).values())
    return {
        "adapter_mib": round(numel * 4 / 2**20, 1),  # float32, as it is sent
        "ms": {arm: summary(found) for arm, found in rounds.items()},
        "sleep_s": [sleep_and_wake(llm) for _ in range(3)] if cuda else [],
        "correct": correct,
    }


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median ms of the rounds after the first, which allocates and plans; that one as `first`."""
    medians = {name: statistics.median(one[name] for one in rounds[1:] or rounds) for name in rounds[0]}
    return {name: round(value * 1e3, 2) for name, value in medians.items()} | {
        "first": round(rounds[0]["total"] * 1e3, 2)
    }


def receive(worker: Any, arm: str, config: dict[str, Any], layout: Any, checksum: int | None) -> dict[str, float]:
    """Receiving and writing, in the worker."""
    from verl.utils.device import is_support_ipc
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from verl_qerl.verl_plugin.config.base_options import CHECKSUM, LAYOUT
    from verl_qerl.verl_plugin.weight_sync import worker_extension

    worker = getattr(worker, "worker", worker)  # which vLLM wraps
    seconds: dict[str, float] = {}
    shared = {"base_sync_done": True, "use_shm": not is_support_ipc()}
    worker._qerl_base_unchecked = False  # the dummies have no digests
    began = time.perf_counter()
    if arm == "ours":
        place = worker._qerl_place

        def timed(*arguments: Any) -> None:
            host_time.synchronize()
            seconds["receive"] = time.perf_counter() - began
            place(*arguments)

        require_placed = worker_extension.require_placed

        def timed_reading(*arguments: Any) -> None:
            host_time.synchronize()
            start = time.perf_counter()
            require_placed(*arguments)
            seconds["read_back"] = time.perf_counter() - start

        worker._qerl_place, worker_extension.require_placed = timed, timed_reading
        worker.update_weights_from_ipc(peft_config={**config, LAYOUT: layout, CHECKSUM: checksum}, **shared)
        worker_extension.require_placed = require_placed
        del worker._qerl_place
    else:
        vLLMColocateWorkerExtension.update_weights_from_ipc(worker, peft_config=dict(config), **shared)
    host_time.synchronize()
    total = time.perf_counter() - began
    return seconds | ({"write": total - seconds["receive"]} if seconds else {}) | {"total": total}


def holds(worker: Any, seed: int, num_linears: int) -> bool:
    """Whether the buffers of the first and the last linear hold what was sent."""
    import torch

    manager = worker.model_runner.lora_manager._adapter_manager
    layers = list(manager.modules.values())
    found = []
    for layer, first in ((layers[0], 0), (layers[-1], 2 * (num_linears - 1))):
        for buffers, index, factor in ((layer.lora_a_stacked, first, 1), (layer.lora_b_stacked, first + 1, SCALING)):
            expected = torch.tensor(value_of(seed, index)).bfloat16() * factor
            found.append(bool((buffers[0][0, 0] == expected.to(buffers[0].device)).all()))
    return all(found)


def sleep_and_wake(llm: Any) -> dict[str, float]:
    """Seconds of falling asleep and of waking in verl's two steps, and the GiB that sleep frees."""
    import torch

    before = torch.cuda.mem_get_info()[0]
    times = [time.perf_counter()]
    llm.sleep(level=1)
    times.append(time.perf_counter())
    freed = torch.cuda.mem_get_info()[0] - before
    for tag in ("weights", "kv_cache"):
        llm.wake_up(tags=[tag])
        host_time.synchronize()
        times.append(time.perf_counter())
    names = ("sleep", "wake_weights", "wake_kv_cache")
    spans = {name: round(end - start, 4) for name, start, end in zip(names, times, times[1:], strict=False)}
    return spans | {"freed_gib": round(freed / 2**30, 2)}


if __name__ == "__main__":
    sys.exit(main())
