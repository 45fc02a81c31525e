"""Whole GRPO steps of ours beside stock verl as its best user would set it, one arm at a time on each GPU.

    python tests/bench/bench_step.py --out FILE.json --model DIR --data DIR [--steps 6] [-- overrides of main_ppo]

The runs are those of recipes/study (--data is what its prepare.py makes), but of 64 questions of GSM8K: 8 answers of at
most 512 tokens to each, LoRA of rank 32, packed passes, fused head, Liger's kernels. The overrides go to all of them:

    # 7B, 128 answers of 2,048 tokens, whatever the model says
    -- data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 data.max_response_length=2048
       actor_rollout_ref.rollout.max_model_len=2304 actor_rollout_ref.rollout.ignore_eos=True

Stock runs are helped: the study lets them look for answers every 0.2 s, they keep the base in bf16, and a head that is
not tied has fused kernels (fused_head.py). With our attention they also have what patch verl/0019 does: since 88c3b726
the sync of a merged adapter copies no model to the CPU, as it did in the files of before. Steps after the first count.
Exit code 1 when an arm has no second step.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import result_file
from qerl_testing import current_commit

HERE = Path(__file__).resolve().parent
STUDY = HERE.parents[1] / "recipes" / "study" / "run.py"
# Name in the table -> verl's.
PHASES = {
    "step": "step",
    "rollout": "gen",
    "log_probs": "old_log_prob",
    "update": "update_actor",
    "weight_sync": "update_weights",
}
BATCH = [  # twice the study's
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.max_num_seqs=512",
]
TUNED = ["actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"]


class Arm(NamedTuple):
    """A run of the study, by the name of its arm, with options of its own."""

    study: str
    options: list[str]
    stock: bool = True


ARMS = {
    # In a run of ten stages the KL of the noise is measured in one step of many; in these few it would be in each.
    "ours": Arm("nvfp4_aqn", ["++aqn.num_stages=2", "++aqn.sigma_start=5e-4"], stock=False),
    "stock": Arm("bf16", TUNED),
    "stock_merged": Arm("bf16_merge", TUNED),
    # Keeps all activations, as ours does by itself where they fit. PEFT adds float32 copies of the inputs of each
    # linear, so that half as many tokens fit into a micro-batch.
    "stock_merged_kept": Arm(
        "bf16_merge",
        [
            *TUNED,
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        ],
    ),
}


def command(arm: Arm, args: argparse.Namespace, work: Path) -> list[str]:
    """What runs one arm; its result file will be in `work`."""
    options = {"--arms": arm.study, "--steps": args.steps, "--minutes": args.minutes, "--least": 0}
    options |= {"--model": args.model, "--data": args.data, "--validate": "none"}
    options |= {"--out": work, "--earlier": work, "--work": work / "runs", "--tag": "step"}
    given = [str(part) for pair in options.items() for part in pair]
    return [sys.executable, str(STUDY), *given, "--", *BATCH, *arm.options, *args.overrides]


def run(args: argparse.Namespace, gpus: list[str], work: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Run all arms, each as soon as a GPU is free; after each, what the study has written of those that ended."""
    free, of_thread = iter(gpus), threading.local()

    def take_gpu() -> None:
        of_thread.gpu = next(free)

    def measure(name: str) -> str:
        arm = ARMS[name]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": of_thread.gpu}
        if arm.stock:
            path = filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
            env |= {"VERL_USE_EXTERNAL_MODULES": "fused_head", "PYTHONPATH": os.pathsep.join(path)}
        subprocess.run(command(arm, args, work / name), env=env, check=False)
        return name

    found = {}
    with ThreadPoolExecutor(len(gpus), initializer=take_gpu) as pool:
        for ended in as_completed([pool.submit(measure, name) for name in args.arms]):
            for file in sorted((work / ended.result()).glob("*.json")):
                found[ended.result()] = json.loads(file.read_text())
            yield {name: found[name] for name in args.arms if name in found}


def row(name: str, session: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each phase of the steps after the first, with their medians."""
    (told,) = session["runs"].values()
    metrics = told["metrics"]
    # A step that verl did not time, as one that was cut, has None.
    seconds = {
        phase: [each for each in metrics.get(f"timing_s/{key}", [])[1:] if each is not None]
        for phase, key in PHASES.items()
    }
    return {
        "arm": name,
        "gpu": told["gpu"],
        "state": told["state"],
        "error": told.get("error", ""),
        "median_s": {phase: round(statistics.median(each), 2) for phase, each in seconds.items() if each},
        "seconds": seconds,
        "answer_tokens": metrics.get("response_length/mean", [])[1:],
        "peak_allocated_gb": max(filter(None, metrics.get("actor/perf/max_memory_allocated_gb", [])), default=None),
        "options": told["options"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Medians, the smallest and the largest step, and how many times as long as ours a step takes."""
    ours = next((row["median_s"].get("step") for row in rows if row["arm"] == "ours"), None)
    lines = ["| seconds, median | " + " | ".join(PHASES) + " | step / ours | actor's peak, GiB |"]
    lines.append("|---" * (len(PHASES) + 3) + "|")
    for row in rows:
        found = row["median_s"]
        cells = [f"{found[phase]:.1f}" if phase in found else "-" for phase in PHASES]
        if steps := row["seconds"].get("step"):
            cells[0] += f" ({min(steps):.1f} to {max(steps):.1f})"
        cells.append(f"{found['step'] / ours:.2f}" if ours and "step" in found else "-")
        cells.append(f"{row['peak_allocated_gb']:.1f}" if row["peak_allocated_gb"] else "-")
        lines.append(f"| {row['arm']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="in bf16")
    parser.add_argument("--data", type=Path, required=True, help="of recipes/study/prepare.py")
    parser.add_argument("--describe", default="", help="of the model, for the result file")
    parser.add_argument("--arms", nargs="+", default=["ours", "stock", "stock_merged"], choices=list(ARMS))
    parser.add_argument(
        "--gpus", default=os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3", help="with fewer than arms, arms wait"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=15, help="for each arm")
    parser.add_argument("overrides", nargs="*", help="of main_ppo, behind `--`")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    result = {"describe": args.describe, "commit": current_commit(), "overrides": args.overrides}
    with tempfile.TemporaryDirectory(prefix="step") as work:
        for found in run(args, args.gpus.split(","), Path(work)):
            rows = [row(name, session) for name, session in found.items()]
            session = next(iter(found.values()))["session"] if found else {}
            result |= {"timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
            result |= {"versions": session.get("versions"), "cores": session.get("cores"), "rows": rows}
            result_file.write(args.out, result)
    print(table(rows))
    return int(len(rows) < len(args.arms) or any("step" not in row["median_s"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
