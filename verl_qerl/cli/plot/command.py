"""`plot`: curves of one run, or of several arms and seeds, from the JSON lines of verl's `file` logger."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_qerl.cli.output_dir import new_file
from verl_qerl.cli.plot import curves
from verl_qerl.cli.plot.curves import STEP_TIME, VALIDATION, WINDOW, Run, Series, first_and_last
from verl_qerl.cli.plot.pictures import check_picture, draw

REWARD = ("critic/score/mean", "critic/rewards/mean")
# KL(rollout || actor), which every run has, and KL to the reference come first.
PANELS = ("rollout_corr/k3_kl", "actor/kl_loss", "actor/entropy", "aqn/sigma")


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("plot", help="curves of a run, or of several arms and seeds", description=__doc__)
    parser.add_argument(
        "metrics", type=Path, nargs="+", help="JSON lines of verl's `file` logger; seeds of an arm as ARM-seedN.jsonl"
    )
    parser.add_argument("--out", type=Path, required=True, help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--keys", nargs="+", help="metrics to show instead")
    parser.add_argument(
        "--questions", type=int, metavar="N", help="of the validation set: 95 %% intervals of its curve"
    )
    parser.add_argument("--baseline", help="arm from which the others are subtracted, seed by seed")
    parser.add_argument("--json", type=Path, help="file for the numbers of all curves")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the numbers and write the picture.

    Raises:
        ValueError: `out` is no picture, `json` would replace that or a file of metrics, a metric is missing, or the
            runs of an arm have no step in common.
    """
    check_picture(args.out)
    for what, paths in (("metrics", args.metrics), ("picture", [args.out])):
        if args.json and args.json.resolve() in (path.resolve() for path in paths):
            raise ValueError(f"the {what} would be lost: --json={args.json}. Another file is accepted. Change --json.")
    if args.questions is not None and args.questions < 1:
        raise ValueError(f"too small: --questions={args.questions}. 1 or more is accepted. Raise it.")
    paths = curves.by_arm(args.metrics)
    arms = {arm: {seed: curves.read_metrics(path) for seed, path in seeds.items()} for arm, seeds in paths.items()}
    runs = [run for seeds in arms.values() for run in seeds.values()]
    keys = args.keys or default_keys(runs)
    for arm, seed in ((arm, seed) for arm, seeds in arms.items() for seed in seeds):
        missing = [key for key in keys if key not in arms[arm][seed]]
        if missing:
            raise ValueError(
                f"metrics are missing, or NaN in every step: keys={missing} in {paths[arm][seed]}. It has"
                f" {sorted(arms[arm][seed])}. Choose from these with --keys."
            )
    summary = {arm: curves.summarize(seeds, keys) for arm, seeds in arms.items()}
    if args.baseline:
        curves.add_differences(summary, arms, keys, args.baseline)
    phases = curves.phases(runs[0]) if len(runs) == 1 and not args.keys else {}
    print("\n".join(step_table(runs[0], keys, phases) if len(runs) == 1 else arm_table(summary, keys)))
    if args.questions is None and any(VALIDATION.fullmatch(key) for key in keys):
        print("the validation curve has intervals with --questions, the number of its questions")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with new_file(args.out) as partial:
        draw(summary, keys, phases, args.questions, partial)
    print(f"wrote {args.out}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with new_file(args.json) as partial:
            partial.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    return 0


def default_keys(runs: Sequence[Run]) -> list[str]:
    """Reward, validation, KL, entropy and noise, where all runs have them at a step; of several the time of a step."""
    known = {key for key in runs[0] if set.intersection(*(set(run.get(key, ())) for run in runs))}
    reward = next((key for key in REWARD if key in known), REWARD[0])
    panels = (*PANELS, STEP_TIME) if len(runs) > 1 else PANELS
    return [reward, *sorted(filter(VALIDATION.fullmatch, known)), *(key for key in panels if key in known)]


def step_table(run: Run, keys: Sequence[str], phases: Mapping[str, Series]) -> list[str]:
    """A line for each step that has any of the metrics; then the ends of the first, and what a step's time goes to."""
    lines = [" ".join(["  step", *(f"{key:>18}" for key in keys)])]
    for step in sorted(set().union(*(run[key] for key in keys))):
        cells = (f"{run[key][step]:>#18.5g}" if step in run[key] else f"{'-':>18}" for key in keys)
        lines.append(" ".join([f"{step:>6}", *cells]))
    first, last = first_and_last(run[keys[0]])
    count = min(WINDOW, len(run[keys[0]]))
    lines.append(f"{keys[0]}: mean of the first {count} steps {first:#.4g}, of the last {count} steps {last:#.4g}")
    if phases:
        medians = (f"{name} {_median(seconds):.2f} s" for name, seconds in phases.items())
        lines.append(f"medians, of {_median(run[STEP_TIME]):.2f} s a step: {', '.join(medians)}")
    return lines


def _median(seconds: Series) -> float:
    """Over the steps that have the phase."""
    return float(np.median([one for one in seconds.values() if one > 0] or [0.0]))


def arm_table(summary: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """A Markdown table: a line for each arm."""
    counts = {key: _window([len(numbers[key]["steps"]) for numbers in summary.values()]) for key in keys}
    names = " | ".join(f"{key}: mean of the first {count} steps, of the last {count}" for key, count in counts.items())
    lines = [f"| arm | seeds | steps | {names} |", "|---" * (3 + len(keys)) + "|"]
    for arm, numbers in summary.items():
        size = f"{len(numbers['seeds'])} | {len(numbers[keys[0]]['steps'])}"
        lines.append(f"| {arm} | {size} | {' | '.join(_cell(numbers[key]) for key in keys)} |")
    return lines


def _window(steps: Sequence[int]) -> str:
    """How many steps the first and last means of runs of so many `steps` are of."""
    low, high = (min(WINDOW, of(steps)) for of in (min, max))
    return f"{low}" if low == high else f"{low} to {high}"


def _cell(numbers: Mapping[str, Any]) -> str:
    ends = f"{_spread(numbers['first'])}, {_spread(numbers['last'])}"
    return ends + (f", {_spread(numbers['minus_baseline'])} minus the baseline" if "minus_baseline" in numbers else "")


def _spread(number: Sequence[float]) -> str:
    return f"{number[0]:.4g} +- {number[1]:.2g}"
