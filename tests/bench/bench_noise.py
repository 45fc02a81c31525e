"""What noise on the norms does to a model that can answer: entropy, accuracy and pass@k on GSM8K, by setting and draw.

    python tests/bench/bench_noise.py --model DIR --data gsm8k/test.jsonl --out RAW.jsonl --seconds 560 --draws 4 \
        --settings nvfp4:minmax nvfp4:minmax/additive/batch@0.01,0.02,0.05 nvfp4:minmax/multiplicative/batch@0.05
    python tests/bench/bench_noise.py --report RAW.jsonl... --out tests/bench/results/<gpu>/noise.json

Settings are written as noise_plan.py says; each is measured with --draws draws, without noise as many times. An engine
is started for each base, and for each mode and draw where a draw is not a batch's; the processes of several GPUs, each
with its own settings and file, stand beside each other with CUDA_VISIBLE_DEVICES. A line is added to the file after
each setting, and what is in it is not measured again. Needs math-verify. `--report` merges files, prints the table and
writes the summary and a picture beside it.

An answer is right if math-verify says so of its last box. Entropy is the mean of -log p over sampled tokens. Norms are
in float32 in all settings, those without noise too.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import noise_plan
import noise_report
import result_file
import rollout_process


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to add to; with --report the summary")
    parser.add_argument("--report", type=Path, nargs="+", metavar="RAW", help="merge these files; nothing is measured")
    parser.add_argument("--model", help="bf16 model directory with tokenizer, chat template and generation config")
    parser.add_argument("--describe", default="", help="what the model is, for the result file")
    parser.add_argument("--data", help="GSM8K's test.jsonl")
    parser.add_argument("--settings", nargs="+", default=[])
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--scored", type=int, default=256, help="answers that KL is taken on (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=1024, help="at once (default: %(default)s)")
    parser.add_argument("--memory", type=float, default=0.6, help="vLLM's share of the GPU")
    parser.add_argument("--seconds", type=float, default=3600, help="no setting is begun that would end later")
    args = parser.parse_args(arguments)
    if args.report:
        return noise_report.report(args.report, args.out)
    if not (args.model and args.data and args.settings):
        parser.error("--model, --data and --settings are needed to measure")
    if importlib.util.find_spec("math_verify") is None:
        parser.error("math_verify is missing, without which no answer can be scored: pip install math-verify")
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Run an engine after the other on what is not in the file yet; 1 if one of them failed."""
    end = time.monotonic() + args.seconds
    settings = noise_plan.parse_settings(args.settings, args.draws)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {noise_plan.setting_of(line) for line in noise_plan.read_lines(args.out) if "setting" in line}
    settings = [setting for setting in settings if setting not in done]
    if not settings:
        print(f"{args.out} has all of these settings.")
        return 0
    options = {name: value for name, value in vars(args).items() if name not in ("out", "report", "model", "data")}
    noise_plan.append_line(args.out, result_file.header(options))
    failed = 0
    for group in noise_plan.by_engine(settings):
        failed |= run_engine(args, group, end)
    return failed


def run_engine(args: argparse.Namespace, group: list[noise_plan.Setting], end: float) -> int:
    """One engine's settings in a process of its own; 1 if it failed."""
    keys = ("model", "data", "questions", "answers", "max_tokens", "scored", "sequences", "memory")
    job: dict[str, Any] = {key: getattr(args, key) for key in keys}
    job |= {"out": str(args.out.absolute()), "settings": [dataclasses.asdict(setting) for setting in group]}
    job["seconds"] = end - time.monotonic()
    if job["seconds"] <= 0:
        print(f"no time is left for {group[0].engine}", flush=True)
        return 0
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, (str(here), str(here.parents[1]), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "job.json").write_text(json.dumps(job))
        command = [sys.executable, str(here / "noise_engine.py"), str(file)]
        # A session of its own: its workers go with it.
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
        try:
            return int(process.wait() != 0)
        finally:
            rollout_process.kill(process)


if __name__ == "__main__":
    sys.exit(main())
