"""`compare`: runs that differ in an arm and a seed, by arms: means and spread over the seeds."""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_qerl.cli.plot import WINDOW, Series, check_picture, first_and_last, moving_average, read_series

KEYS = ("critic/score/mean", "rollout_corr/k3_kl")  # reward; KL(rollout || actor), which every run has
LOG_FROM = 30
_RUN = re.compile(r"(?P<arm>.+)-seed(?P<seed>\d+)")


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "compare", help="runs of several arms and seeds: means and spread", description=__doc__
    )
    parser.add_argument("metrics", type=Path, nargs="+", help="ARM-seedN.jsonl, JSON lines of verl's `file` logger")
    parser.add_argument("--out", type=Path, required=True, help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--json", type=Path, help="file for the numbers of the table and the curves")
    parser.add_argument("--baseline", help="arm from which the others are subtracted, seed by seed")
    parser.add_argument("--keys", nargs="+", default=list(KEYS), help="metrics to show (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line for each arm and write the picture.

    Raises:
        ValueError: `out` is no picture, or the runs of an arm have no step in common.
    """
    check_picture(args.out)
    arms = {
        arm: {seed: read_series(path, args.keys) for seed, path in paths.items()}
        for arm, paths in by_arm(args.metrics).items()
    }
    for arm, seeds in arms.items():
        if not _common_steps(list(seeds.values()), args.keys):
            raise ValueError(
                f"the runs of an arm have no step in common: arm={arm}, seeds={sorted(seeds)}. Runs over the same steps"
                " are accepted. Leave one out."
            )
    summary = {arm: summarize(seeds) for arm, seeds in arms.items()}
    if args.baseline:
        add_differences(summary, arms, args.baseline)
    for line in table(summary, args.keys):
        print(line)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(summary, args.keys, args.out)
    print(f"wrote {args.out}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    return 0


def by_arm(paths: Sequence[Path]) -> dict[str, dict[int, Path]]:
    """Arm -> seed -> file, in the order of the arms' first files.

    Raises:
        ValueError: A name is not ARM-seedN.jsonl, or a run comes twice.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in paths:
        match = _RUN.fullmatch(path.stem)
        if match is None:
            raise ValueError(
                f"no arm and no seed in a name: metrics={path}. ARM-seedN.jsonl is accepted, as int8-acr-seed1.jsonl."
                " Rename the file."
            )
        seeds = found.setdefault(match["arm"], {})
        if int(match["seed"]) in seeds:
            raise ValueError(
                f"a run comes twice: metrics={seeds[int(match['seed'])]} and {path}. One file for each arm and seed is"
                " accepted. Leave one out."
            )
        seeds[int(match["seed"])] = path
    return found


def summarize(seeds: Mapping[int, Mapping[str, Series]]) -> dict[str, Any]:
    """Numbers of one arm.

    Args:
        seeds: Seed -> metric -> value of each step.

    Returns:
        `seeds`; `steps`, those that every seed has; and for each metric `values` of each seed and step, `mean` and `sd`
        over the seeds of each step, `first` and `last`, [mean, sd] over the seeds of a seed's mean over WINDOW steps.
        The deviation is that of a sample, and 0 of a single seed.
    """
    runs = list(seeds.values())
    keys = list(runs[0])
    steps = _common_steps(runs, keys)
    summary: dict[str, Any] = {"seeds": sorted(seeds), "steps": steps}
    for key in keys:
        values = _values(runs, key, steps)
        ends = np.array([first_and_last({step: series[key][step] for step in steps}) for series in runs])
        summary[key] = {"values": values.tolist(), "mean": values.mean(0).tolist(), "sd": _deviation(values).tolist()}
        summary[key] |= {
            name: [float(ends[:, i].mean()), float(_deviation(ends)[i])] for i, name in enumerate(("first", "last"))
        }
    return summary


def add_differences(
    summary: dict[str, dict[str, Any]], arms: Mapping[str, Mapping[int, Mapping[str, Series]]], baseline: str
) -> None:
    """Add `minus_baseline` to each metric of the other arms.

    It is [mean, sd] over the seeds that both have, of the mean over the steps that all these runs have, minus the
    baseline's of the same seed. Runs of one seed meet the same questions: this is steadier than a difference of means.

    Raises:
        ValueError: There is no such arm, or an arm has no seed and step in common with it.
    """
    if baseline not in arms:
        raise ValueError(
            f"no run of the arm: baseline={baseline}. One of {sorted(arms)} is accepted. Add its files or name another."
        )
    for arm, seeds in arms.items():
        if arm == baseline:
            continue
        common = sorted(set(seeds) & set(arms[baseline]))
        pairs = [arms[arm][seed] for seed in common], [arms[baseline][seed] for seed in common]
        keys = list(next(iter(seeds.values())))
        steps = _common_steps(pairs[0] + pairs[1], keys) if common else []
        if not steps:
            raise ValueError(
                f"nothing to subtract: arm {arm} has no seed and step in common with baseline={baseline}. Runs with the"
                " same seeds are accepted. Leave out --baseline, or that arm."
            )
        for key in keys:
            ours, theirs = (_values(runs, key, steps).mean(1) for runs in pairs)
            difference = ours - theirs
            summary[arm][key]["minus_baseline"] = [float(difference.mean()), float(_deviation(difference))]


def _common_steps(runs: Sequence[Mapping[str, Series]], keys: Sequence[str]) -> list[int]:
    return sorted(set.intersection(*(set(series[key]) for series in runs for key in keys)))


def _values(runs: Sequence[Mapping[str, Series]], key: str, steps: Sequence[int]) -> np.ndarray:
    return np.array([[series[key][step] for step in steps] for series in runs])


def _deviation(values: np.ndarray) -> np.ndarray:
    return values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1:])


def table(summary: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """A Markdown table: a line for each arm."""
    ends = f"mean of the first {WINDOW} steps, of the last {WINDOW}"
    lines = [
        f"| arm | seeds | steps | {' | '.join(f'{key}: {ends}' for key in keys)} |",
        "|---" * (3 + len(keys)) + "|",
    ]
    for arm, numbers in summary.items():
        cells = [_cell(numbers[key]) for key in keys]
        lines.append(f"| {arm} | {len(numbers['seeds'])} | {len(numbers['steps'])} | {' | '.join(cells)} |")
    return lines


def _cell(numbers: Mapping[str, Any]) -> str:
    ends = f"{_spread(numbers['first'])}, {_spread(numbers['last'])}"
    return ends + (f", {_spread(numbers['minus_baseline'])} minus the baseline" if "minus_baseline" in numbers else "")


def _spread(number: Sequence[float]) -> str:
    return f"{number[0]:.4g} +- {number[1]:.2g}"


def scale_of(curves: Iterable[Sequence[float]]) -> str:
    """Scale of a panel with these curves: `log` where all are positive and they differ by LOG_FROM, else `linear`."""
    values = np.concatenate([np.array(curve) for curve in curves])
    return "log" if 0 < values.min() * LOG_FROM < values.max() else "linear"


def draw(summary: Mapping[str, Mapping[str, Any]], keys: Sequence[str], out: Path) -> None:
    """A panel for each metric: moving averages of the means, in a band of one deviation to each side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (8, 2 + 3 * len(keys))
    figure, axes = plt.subplots(len(keys), 1, sharex=True, squeeze=False, figsize=size, layout="constrained")
    for axis, key in zip(axes[:, 0], keys, strict=True):
        for arm, numbers in summary.items():
            mean, sd = (np.array(moving_average(numbers[key][part])) for part in ("mean", "sd"))
            (line,) = axis.plot(numbers["steps"], mean, linewidth=1.5, label=f"{arm} ({len(numbers['seeds'])})")
            axis.fill_between(numbers["steps"], mean - sd, mean + sd, alpha=0.15, color=line.get_color(), linewidth=0)
        axis.set_yscale(scale_of(numbers[key]["mean"] for numbers in summary.values()))
        axis.set_ylabel(key)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, title="arm (seeds)")
    axes[-1, 0].set_xlabel("step")
    figure.savefig(out, dpi=150)
    plt.close(figure)
