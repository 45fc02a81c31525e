"""What schedule() takes of a decode step: vLLM's scheduler by itself, and ours (vllm_plugin/decode), which asks less.

    python tests/bench/bench_schedule.py --out tests/bench/results/cpu/schedule.json [--batches 1 32 256]

Two engines of a model of two layers with random weights, blocks of 16 tokens as on a GPU, by turns; what else a step
takes does not count, so that no GPU is needed. Of each batch the mean of all steps that decode all of it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import rollout_arms
import rollout_load
import rollout_report

PROMPT, BLOCK = 64, 16
ARMS = {"vllm": None, "ours": rollout_arms.SCHEDULER}


def start(scheduler: str | None, folder: Path, largest: int, new_tokens: int) -> Any:
    """An engine in this process."""
    import vllm

    room = rollout_load.kv_tokens(largest, PROMPT + new_tokens, BLOCK) + 64 * BLOCK
    return vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=PROMPT + new_tokens + 1,
        max_num_seqs=largest,
        block_size=BLOCK,
        kv_cache_memory_bytes=room * rollout_arms.SHAPES["tiny"].kv_bytes,
        scheduler_cls=scheduler,
    )


def scheduler_of(engine: Any) -> Any:
    """vLLM's, of this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler


def schedule_ms(engine: Any, batch: int, new_tokens: int) -> list[float]:
    """Of each step that decodes the whole batch."""
    from vllm import SamplingParams

    scheduler = scheduler_of(engine)
    schedule, found = scheduler.schedule, []

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        output = schedule(*args)
        seconds = time.perf_counter() - began
        if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens) == batch:
            found.append(seconds * 1e3)
        return output

    scheduler.schedule = timed
    prompts = [{"prompt_token_ids": [1 + index % 60] * PROMPT} for index in range(batch)]
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    engine.generate(prompts, params, use_tqdm=False)
    scheduler.schedule = schedule
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 64, 128, 256])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of each batch, the arms by turns")
    args = parser.parse_args(arguments)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    rows, managers = [], {}
    with tempfile.TemporaryDirectory() as work:
        folder = rollout_arms.write_model(Path(work), rollout_arms.SHAPES["tiny"], packed=False)
        sizes = max(args.batches), args.new_tokens
        engines = {arm: start(scheduler, folder, *sizes) for arm, scheduler in ARMS.items()}
        for arm, engine in engines.items():
            managers[arm] = type(scheduler_of(engine).kv_cache_manager).__name__
        for batch in args.batches:
            times: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for _ in range(args.rounds):
                for arm, engine in engines.items():
                    times[arm] += schedule_ms(engine, batch, args.new_tokens)
            for arm, found in times.items():
                rows.append({"arm": arm, "batch": batch, "steps": len(found), "ms": round(statistics.fmean(found), 4)})
                print(rows[-1], flush=True)
    head = rollout_report.header({"batches": args.batches, "new_tokens": args.new_tokens, "rounds": args.rounds})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**head, "kv_cache_managers": managers, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
