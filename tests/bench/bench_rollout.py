"""Decode, prefill and a realistic rollout of vLLM: stock bf16, NVFP4 and FP8 with LoRA beside our NVFP4.

    python tests/bench/bench_rollout.py --out FILE.json --models 7B --arms bf16_lora_stock nvfp4_lora_ours --realistic
    python tests/bench/bench_rollout.py --out FILE.json --append --profile --no-fixed
    python tests/bench/bench_rollout.py --out FILE.json --append --plan 540
    python tests/bench/bench_rollout.py --table FILE.json

One GPU; every (model, rank, arm) is an engine in a process of its own (rollout_engine.py, which says what is measured;
rollout_arms.py has the arms). The file is written after every row, so that a killed run loses one row; `--plan SECONDS`
takes what it lacks in the order of rollout_plan.py. Exit code 1 when an engine failed.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result_file
import rollout_arms
import rollout_plan
import rollout_process
import rollout_profile
import rollout_report

GRACE_S = 240  # beyond --arm-seconds, for the measurement that is under way
PLAN_GRACE_S = 30  # beyond --plan, where only what should end in time is begun
ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::.*)?)$", re.MULTILINE)

# What our side of vLLM says when it does not do what was asked for.
SAID = re.compile(r"verl_qerl: |NVFP4 linears|WARNING.*verl_qerl")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return 0
    options = {name: value for name, value in vars(args).items() if not isinstance(value, Path) and value is not None}
    report = rollout_report.Report(args.out, result_file.header(options), args.append)
    failed = False
    with rollout_process.Starter(args.work) as starter:
        for job in jobs(args) if args.plan is None else planned(args, report):
            error = run(job, starter, report)
            if error:
                failed = True
                print(f"FAILED {job['arm']} {job['model']} rank {job['rank']}: {error}", flush=True)
                report.add("failures", {name: job[name] for name in rollout_report.ENGINE} | {"error": error})
    print(f"\n{tables(report.data)}")
    return int(failed)


def tables(data: dict[str, Any]) -> str:
    """Everything that a result file says."""
    return "\n\n".join(filter(None, (rollout_report.tables(data), rollout_profile.tables(data))))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measured = [arm for arm in rollout_report.ARMS if "lora" in arm and arm not in rollout_arms.VARIANTS]
    shapes = rollout_arms.SHAPES
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--append", action="store_true", help="keep the other rows of --out")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the tables of a result file")
    parser.add_argument("--arms", nargs="+", default=measured, choices=list(rollout_arms.ARMS), metavar="ARM")
    parser.add_argument(
        "--models", nargs="+", default=["7B"], choices=list(shapes), metavar="MODEL", help=f"{[*shapes]}"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--ranks", nargs="+", type=int, default=[32])
    parser.add_argument("--prompts", nargs="+", type=int, default=[256, 1024], help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--realistic", nargs="*", type=int, metavar="N", help="prompts and answers of each; 128 8")
    parser.add_argument(
        "--functions", action="store_true", help="a round of --realistic more, to see those of the host"
    )
    parser.add_argument("--profile", nargs="*", type=int, metavar="BATCH", help="kernels of a decode step; 1 32 256")
    parser.add_argument("--no-fixed", action="store_true", help="leave out what --batches and --new-tokens select")
    parser.add_argument("--max-num-seqs", type=int, default=0, help="of the engine; the largest batch")
    parser.add_argument("--arm-seconds", type=int, default=600, help="no measurement of an engine begins after that")
    parser.add_argument("--plan", type=int, metavar="SECONDS", help="rollout_plan.py's order, for so long; 0 lists it")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS")
    parser.add_argument("--own-process", action="store_true", help="of the engine, and of its worker, as in verl")
    parser.add_argument("--log-probs", action="store_true", help="of the drawn tokens, as verl asks for them")
    parser.add_argument("--eager", action="store_true", help="neither CUDA graphs nor torch.compile")
    work = Path(tempfile.gettempdir()) / "verl_qerl_bench"
    parser.add_argument("--work", type=Path, default=work, help="models, adapters, and what the engines print")
    args = parser.parse_args(arguments)
    if not args.table and not args.out:
        parser.error("--out is missing")
    if args.new_tokens < 2:
        parser.error(f"--new-tokens {args.new_tokens}: a decode step is the difference to one token; give 2 or more")
    args.profile = [] if args.profile is None else args.profile or [1, 32, 256]
    args.realistic = None if args.realistic is None else args.realistic or [128, 8]
    if args.realistic and len(args.realistic) != 2:
        parser.error("--realistic takes no number or two")
    if (args.tensor_parallel > 1 or args.own_process) and args.profile:
        parser.error("--profile sees the kernels of this process; leave out --tensor-parallel and --own-process")
    return args


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One per engine; those that are compared run one after the other. Arms without an adapter run once, as rank 0."""
    batches = [] if args.no_fixed else sorted(args.batches)
    # A realistic rollout runs as many sequences at a time as the largest batch has, with those batches or without.
    sizes = [*(args.batches if batches or args.realistic else []), *args.profile]
    largest = args.max_num_seqs or max(sizes, default=1)
    fixed = [(prompt, batch) for prompt in args.prompts for batch in batches]
    whole = {"prompt": min(args.prompts), **dict(zip(("prompts", "samples"), args.realistic or (), strict=False))}
    chosen = {
        "fixed": fixed,
        "new_tokens": args.new_tokens,
        "realistic": whole if args.realistic else None,
        "profile": args.profile,
        "profile_prompt": args.prompts[0],
        "largest": largest,
    }
    found = []
    for model in args.models:
        for index, rank in enumerate(args.ranks):
            for arm in args.arms:
                lora = rollout_arms.ARMS[arm].lora
                if lora or index == 0:
                    found.append({**common(args), "arm": arm, "model": model, "rank": rank if lora else 0, **chosen})
    return found


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What all engines share."""
    parallel = {"tensor_parallel": args.tensor_parallel}
    kind = {name: getattr(args, name) for name in ("eager", "log_probs", "own_process", "functions")}
    return {"repeats": args.repeats, "seconds": args.arm_seconds, **kind, **parallel}


def planned(args: argparse.Namespace, report: rollout_report.Report) -> Iterator[dict[str, Any]]:
    """What the report lacks, as long as there is time for it. An engine that failed is not tried again."""
    end = time.monotonic() + args.plan
    for whole in rollout_plan.jobs(common(args)):
        job = rollout_plan.remaining(whole, report.data)
        if job is None:
            continue
        starting, measuring = rollout_plan.seconds(job)
        left = end - time.monotonic()
        what = f"{job['arm']} {job['model']} rank {job['rank']}: about {starting:.0f} + {measuring:.0f} s"
        if args.plan and left < starting + rollout_plan.LEAST_S:
            print(f"-- no time for {what}, {left:.0f} s are left", flush=True)
        elif args.plan:
            print(f"-- {what}", flush=True)
            yield {**job, "seconds": left, "grace": PLAN_GRACE_S}
        else:
            print(what)


def run(job: dict[str, Any], starter: rollout_process.Starter, report: rollout_report.Report) -> str | None:
    """Run one engine and take its events into the report while they come. The error in one sentence, or None.

    The model's path is part of the key of vLLM's compile cache: the folder is the same in every run.
    """
    work = starter.work
    shape = rollout_arms.SHAPES[job["model"]]
    packed = rollout_arms.ARMS[job["arm"]].packed
    model = work / f"{job['model']}-{'nvfp4' if packed else 'bf16'}"
    adapter = work / f"{job['model']}-rank-{job['rank']}"
    job["folder"] = str(rollout_arms.write_model(model, shape, packed))
    job["adapter"] = str(adapter)
    if job["rank"] and not (adapter / "adapter_config.json").exists():  # which is written last
        rollout_arms.write_adapter(adapter, shape, job["rank"])
    name = f"{job['arm']}-{job['model']}-{job['rank']}"
    events = work / f"{name}.events"
    events.write_text("")
    job["events"] = str(events)
    print(f"-- {job['arm']} {job['model']} rank {job['rank']}", flush=True)
    process, log = starter.start(job)
    seconds = job["seconds"] + job.get("grace", GRACE_S)

    def take_and_prepare(event: dict[str, Any]) -> bool:
        done = take(event, job, report)
        starter.prepare()  # its first event comes when it has started
        return done

    done, code = rollout_process.follow(process, events, seconds, take_and_prepare)
    text = log.read_text(errors="replace")
    log.replace(work / f"{name}.log")
    for line in dict.fromkeys(line.strip() for line in text.splitlines() if SAID.search(line)):
        print(f"   said: {line}", flush=True)
    if done:
        return None
    print("\n".join(text.splitlines()[-40:]), flush=True)
    if code is None:
        return f"killed {seconds:.0f} s after its start. Raise --arm-seconds or select fewer measurements."
    return error_sentence(text, code)


def take(event: dict[str, Any], job: dict[str, Any], report: rollout_report.Report) -> bool:
    """Put one event into the report. True if it is the last one."""
    kind = event.pop("event")
    if kind == "engine":
        report.add("engines", {name: job[name] for name in rollout_report.ENGINE} | event)
        print(f"   started in {event['startup_s']} s, KV cache of {event['kv_cache_tokens']} tokens", flush=True)
    elif kind == "row":
        report.measured("rows", event["row"])
        print(rollout_report.one_line(event["row"]), flush=True)
    elif kind == "steps":
        report.measured("steps", event["steps"])
    elif kind == "profile":
        profile = event["profile"]
        report.measured("profiles", profile)
        times = f"{profile['wall_us']} us per step, kernels {profile['kernels_us']} us"
        print(f"   profile of batch {profile['batch']}: {times}", flush=True)
    elif kind == "skipped":
        report.add("skipped", event)
        if "KV cache" in event["reason"]:  # there will be no room in another run either
            report.measured("skipped", event)
        print(f"   skipped batch {event['batch']} prompt {event['prompt']}: {event['reason']}", flush=True)
    return kind == "done"


def error_sentence(log: str, code: int) -> str:
    """The last exception that a log shows, else its last line."""
    found = ERROR.findall(log)
    lines = [line for line in log.splitlines() if line.strip()] or [""]
    return found[-1].strip() if found else f"exit code {code}, last line {lines[-1].strip()!r}"


if __name__ == "__main__":
    sys.exit(main())
