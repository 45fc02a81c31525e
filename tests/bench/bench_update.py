"""Log-prob pass and update of verl's actor by itself, without a rollout: seconds, memory and kernels.

    python tests/bench/bench_update.py --arm ours --model DIR --out FILE.json --answers 128 --answer-tokens 2048
    python tests/bench/bench_update.py --table FILE.json

One arm a process, appended to FILE, so that arms run side by side on the GPUs of a machine. `stock` is verl's engine
with LoRA on a bf16 base, `ours` the packed base; `_padded` pads micro-batches with sdpa, else they are packed without
padding; `_twice` checkpoints every layer, `_liger` has Liger's kernels. With --lengths FILE (JSON: a list of [prompt,
answer] numbers of tokens) lengths are those of a real batch. Every arm has fused kernels, LoRA rank 32 and one step of
the optimizer an update.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import host_time
import result_file
import torch
import torch.distributed as dist
from tensordict import TensorDict

PACKED_ATTENTION = "verl_qerl_varlen"
ARMS = {
    "stock_padded": {"ours": False, "packed": False},
    "stock": {"ours": False, "packed": True},
    "ours_padded": {"ours": True, "packed": False},
    "ours_twice": {"ours": True, "packed": True, "twice": True},
    "ours": {"ours": True, "packed": True},
    "ours_liger": {"ours": True, "packed": True, "liger": True},
    "stock_liger": {"ours": False, "packed": True, "liger": True},
}


def build(arm: dict[str, bool], model: Path) -> Any:
    """verl's engine as its actor worker makes it, on one rank."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_qerl import verl_plugin
    from verl_qerl.verl_plugin.actor.engine import QerlFSDPEngine
    from verl_qerl.verl_plugin.config.base_options import QerlFSDPEngineConfig

    verl_plugin.activate()  # both arms compute with our attention
    if not arm["ours"]:
        import fused_head  # noqa: F401  (without it verl's fused kernels do not run)
    options = {"lora_rank": 32, "lora_alpha": 64, "use_fused_kernels": True, "enable_gradient_checkpointing": True}
    options |= {"fused_kernel_options": {"impl_backend": "torch"}}  # verl's default
    attention = PACKED_ATTENTION if arm["packed"] else "sdpa"
    options |= {"use_liger": arm.get("liger", False), "use_remove_padding": arm["packed"]}
    options |= {"override_config": {"attn_implementation": attention}}
    settings = {"strategy": "fsdp2", "use_torch_compile": False, "model_dtype": "bf16"}
    kind = partial(QerlFSDPEngineConfig, qerl={}) if arm["ours"] else FSDPEngineConfig
    engine = (QerlFSDPEngine if arm["ours"] else FSDPEngineWithLMHead)(
        HFModelConfig(path=str(model), load_tokenizer=False, **options),
        kind(**settings),
        FSDPOptimizerConfig(lr=1e-5, total_training_steps=100),
        CheckpointConfig(save_lora_only=True),
    )
    engine.initialize()
    if arm.get("twice"):
        engine._recompute.budget = 0
    return engine


def batch(
    lengths: list[tuple[int, int]], vocabulary: int, arm: dict[str, bool], tokens: int, entropy: bool = False
) -> TensorDict:
    """What a rank gets from verl's trainer: prompts and answers of random tokens; its entropies asked for or not."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(vocabulary, (p + a,), generator=generator) for p, a in lengths]
    numbers = [torch.randn(a, generator=generator) for _, a in lengths]
    ones = [torch.ones(a, dtype=torch.long) for _, a in lengths]
    fields = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "prompts": [row[:p] for row, (p, _) in zip(rows, lengths, strict=True)],
        "responses": [row[p:] for row, (p, _) in zip(rows, lengths, strict=True)],
        "response_mask": ones,
        "loss_mask": ones,
        "old_log_probs": [0.1 * row - 12 for row in numbers],
        "advantages": numbers,
    }
    nested = {name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in fields.items()}
    data = TensorDict(nested, batch_size=len(rows))
    longest = max(p + a for p, a in lengths)
    settings: dict[str, Any] = {"use_dynamic_bsz": arm["packed"], "max_token_len_per_gpu": tokens}
    settings |= {"micro_batch_size_per_gpu": max(1, tokens // longest), "use_remove_padding": arm["packed"]}
    settings |= {"temperature": 1.0, "global_batch_size": len(rows), "use_fused_kernels": True}
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, calculate_entropy=entropy, **settings)
    return data


def timed(call: Any) -> float:
    host_time.synchronize()
    start = time.perf_counter()
    call()
    host_time.synchronize()
    return time.perf_counter() - start


def measure(engine: Any, make: Any, updates: int, entropy: bool = False) -> dict[str, list[float]]:
    """Seconds of each log-prob pass and of each update; the first of them warms up, and decides what is recomputed."""

    def score() -> None:
        with engine.eval_mode():
            engine.infer_batch(make(entropy=entropy))

    def update() -> None:
        with engine.train_mode():
            engine.train_batch(make(), ppo())

    found: dict[str, list[float]] = {"log_prob_s": [], "update_s": []}
    for _ in range(updates + 1):
        found["log_prob_s"].append(round(timed(score), 3))
        found["update_s"].append(round(timed(update), 3))
        print(found, flush=True)
    return found


def ppo() -> Any:
    """verl's loss of GRPO."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    settings = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "entropy_coeff": 0, "use_kl_loss": False}
    return partial(ppo_loss, FSDPActorConfig(strategy="fsdp2", **settings))


def profile(engine: Any, make: Any, path: Path) -> None:
    """Kernels of one more update."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found, engine.train_mode():
        engine.train_batch(make(), ppo())
    sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.write_text(found.key_averages().table(sort_by=sort, row_limit=45, max_name_column_width=110))


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, which other processes may add to as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = json.loads(path.read_text()) if path.exists() else result_file.header({}) | {"rows": []}
        content["rows"].append(row)
        result_file.write(path, content)


def table(content: dict[str, Any]) -> str:
    """Markdown, a row an arm; medians of all but the first."""
    lines = ["| arm | log-probs, s | update, s | tokens/s of the update | peak, GiB |", "|---|---|---|---|---|"]
    for row in content["rows"]:
        log_prob, update = (statistics.median(row[key][1:]) for key in ("log_prob_s", "update_s"))
        rate = f"{row['tokens'] / update:,.0f}"
        lines.append(f"| {row['arm']} | {log_prob:.2f} | {update:.2f} | {rate} | {row['peak_gib']} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file that gets another row")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and measure nothing")
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--model", type=Path, help="directory; packed or bf16, as the arm needs it")
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=2048)
    parser.add_argument("--lengths", type=Path, help="JSON list of [prompt, answer] lengths in the place of the above")
    parser.add_argument("--tokens", type=int, default=8704, help="most of a micro-batch")
    parser.add_argument("--updates", type=int, default=3, help="after the first")
    parser.add_argument("--entropy", action="store_true", help="log-prob passes give entropies, as verl's do in a run")
    parser.add_argument("--profile", type=Path, help="file for a list of kernels of one more update")
    args = parser.parse_args(argv)
    if args.table is None and None in (args.out, args.arm, args.model):
        parser.error("give --out, --arm and --model to measure, or --table FILE")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return 0
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for name, value in (("MASTER_PORT", "0"), ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    lengths = [(args.prompt_tokens, args.answer_tokens)] * args.answers
    if args.lengths:
        lengths = [tuple(pair) for pair in json.loads(args.lengths.read_text())][: args.answers]
    engine = build(ARMS[args.arm], args.model)
    vocabulary = engine.model_config.hf_config.vocab_size
    make = partial(batch, lengths, vocabulary, ARMS[args.arm], args.tokens)
    found = measure(engine, make, args.updates, args.entropy)
    peak = round(torch.cuda.max_memory_reserved() / 2**30, 1) if on_gpu else None
    row = {"arm": args.arm, "model": args.model.name, "answers": len(lengths), "micro_batch_tokens": args.tokens}
    row |= {"entropy": args.entropy, "tokens": sum(p + a for p, a in lengths), "peak_gib": peak}
    row["longest"] = max(p + a for p, a in lengths)
    recompute = getattr(engine, "_recompute", None)
    if recompute is not None:
        kept = recompute.num_kept(args.tokens)
        row |= {"kept_layers": kept, "kib_per_token_and_layer": round(recompute.bytes_per_token / 2**10)}
    append(args.out, row | found)
    if args.profile:
        profile(engine, make, args.profile)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
