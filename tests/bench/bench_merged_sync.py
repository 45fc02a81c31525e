"""A LoRA adapter merged for a weight sync, verl's way and one weight at a time: seconds, memory, and the same bits.

    python tests/bench/bench_merged_sync.py --model DIR --out tests/bench/results/<gpu>/merged_sync.json

One FSDP2 engine on one rank makes all tensors of a sync, in turn by verl's method and by ours. None is sent: what a
sync takes beside is the same for both.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_file
import torch
import torch.distributed as dist
from bench_update import timed


def build(model: Path, dtype: str) -> Any:
    """An engine as a run has it with model.lora.merge=True; B is not zero."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from verl_qerl import verl_plugin
    from verl_qerl.verl_plugin.actor.engine import QerlFSDPEngine

    verl_plugin.activate()
    options = {"override_config": {"attn_implementation": "sdpa"}, "lora": {"merge": True}}
    engine = QerlFSDPEngine(
        HFModelConfig(path=str(model), load_tokenizer=False, lora_rank=32, lora_alpha=64, **options),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype=dtype),
        FSDPOptimizerConfig(lr=1e-5, total_training_steps=100),
        CheckpointConfig(save_lora_only=True),
    )
    engine.initialize()
    torch.manual_seed(0)
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return engine


def measured(make: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and GiB beyond what is held before, of a sync whose tensors are dropped one by one."""
    cuda = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def consume() -> None:
        for _ in make():
            pass

    seconds = timed(consume)
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the actor's weights")
    parser.add_argument("--syncs", type=int, default=5)
    args = parser.parse_args(arguments)
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        engine = build(args.model, args.dtype)
        ways = {
            "verl": lambda: FSDPEngineWithLMHead._merged_lora_per_tensor_param(engine),
            "ours": engine._merged_lora_per_tensor_param,
        }
        found = {way: dict(make()) for way, make in ways.items()}
        num_bytes = sum(tensor.nbytes for tensor in found["ours"].values())
        same = found["verl"].keys() == found["ours"].keys() and all(
            torch.equal(tensor, found["verl"][name]) for name, tensor in found["ours"].items()
        )
        del found
        rows = [{way: measured(make) for way, make in ways.items()} for _ in range(args.syncs)]
        dist.destroy_process_group()
    result = {
        "same_bits": same,
        "bytes": num_bytes,
        "seconds": {way: statistics.median(row[way][0] for row in rows) for way in ways},
        "all_seconds": {way: [row[way][0] for row in rows] for way in ways},
        "extra_gib": {way: max(row[way][1] for row in rows) for way in ways},
    }
    options = {"model": args.model.name, "dtype": args.dtype, "syncs": args.syncs}
    result_file.write(args.out, result_file.header(options) | result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
