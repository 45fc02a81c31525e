"""Tables and curves of all result files of the study.

python3 recipes/study/report.py    # reads results/, writes the tables into README.md and the pictures beside the files
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paired
import results
from claims import CLAIMS, EARLIER, MARGIN, NOT_BY_THESE_RUNS

from verl_qerl.cli.plot.curves import moving_average

HERE = Path(__file__).resolve().parent
ENDS = 10  # steps of the first and last means
BEGIN, END = "<!-- results: written by report.py -->\n", "<!-- end of results -->\n"
Runs = dict[str, dict[str, Any]]
ByArm = dict[str, dict[int, dict[str, Any]]]  # arm -> seed -> run

REWARD, ENTROPY, KL = "critic/score/mean", "rollout_corr/rollout_log_ppl", "rollout_corr/k3_kl"


def series(run: dict[str, Any], key: str) -> np.ndarray:
    """Values of its steps, NaN where there is none."""
    values = run["metrics"].get(key, [None] * len(run["metrics"]["step"]))
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def without_gradient(run: dict[str, Any]) -> np.ndarray:
    """Share of groups whose answers are all right or all wrong."""
    return series(run, "study/all_right") + series(run, "study/all_wrong")


def accuracy(run: dict[str, Any]) -> tuple[float, float, float] | None:
    """Of the last validation: pass@1, half of its 95 % interval over the questions, and pass@samples."""
    if not run["validation"]:
        return None
    found = run["validation"][max(run["validation"], key=int)]
    shares = np.array([int(digit) for digit in found["right"]]) / found["samples"]
    half = 1.96 * shares.std(ddof=1) / np.sqrt(len(shares)) if len(shares) > 1 else np.nan
    return float(shares.mean()), float(half), float((shares > 0).mean())


def _pass1(run: dict[str, Any], steps: int) -> float:
    found = accuracy(run)
    return found[0] if found and run["state"] == "done" else np.nan


# Name -> what it is, and its value of a run whose first so many steps are looked at.
MEASURES: dict[str, tuple[str, Callable[[dict[str, Any], int], float]]] = {
    "area": ("mean reward of all steps", lambda run, steps: float(np.nanmean(series(run, REWARD)[:steps]))),
    "end": (f"reward, last {ENDS} steps", lambda run, n: float(np.nanmean(series(run, REWARD)[max(0, n - ENDS) : n]))),
    "pass1": ("pass@1 on the test set", _pass1),
    "entropy": (f"entropy of the rollout, first {ENDS} steps", lambda run, _: _first(run, ENTROPY)),
}


def _first(run: dict[str, Any], key: str) -> float:
    values = series(run, key)[:ENDS]
    return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan


def compare(arms: ByArm, arm: str, other: str, measure: str) -> paired.Difference | None:
    """Over the seeds that both have, and the steps that all of these runs have; None where there is nothing."""
    seeds = sorted(set(arms.get(arm, {})) & set(arms.get(other, {})))
    steps = min((len(arms[name][seed]["metrics"]["step"]) for name in (arm, other) for seed in seeds), default=0)
    value = MEASURES[measure][1]
    pairs = [(value(arms[arm][seed], steps), value(arms[other][seed], steps)) for seed in seeds]
    pairs = [pair for pair in pairs if np.isfinite(pair).all()]
    return paired.difference(*zip(*pairs, strict=True)) if pairs else None


def by_arm(runs: Runs, task: str, least: int) -> ByArm:
    """Runs of a task with so many steps, in the order of their names."""
    found: ByArm = {}
    for run in runs.values():
        if run["task"] == task and len(run["metrics"]["step"]) >= least:
            found.setdefault(results.arm_of(run), {})[run["seed"]] = run
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and the smallest to the largest."""
    kept = [value for value in values if np.isfinite(value)]
    if not kept:
        return "-"
    mean = f"{np.mean(kept):.{digits}f}"
    return mean if len(kept) == 1 else f"{mean} ({min(kept):.{digits}f} to {max(kept):.{digits}f})"


def shared(run: dict[str, Any]) -> bool:
    """Whether it shared its GPU with another run, so that its times are too long."""
    return run["session"].get("per_gpu", 1) > 1


def table_of_arms(arms: ByArm) -> list[str]:
    """A line for each arm, over its seeds."""
    heads = ["arm", "seeds", "steps", *(text for text, _ in list(MEASURES.values())[:3]), "pass@samples", "boxed"]
    heads += ["groups without gradient", "entropy: rollout", "KL(rollout, actor)", "tokens", "s/step", "GPU"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, seeds in arms.items():
        runs = list(seeds.values())
        steps = min(len(run["metrics"]["step"]) for run in runs)
        tests = [found for run in runs if run["state"] == "done" and (found := accuracy(run))]
        pass1 = spread([found[0] for found in tests])
        pass1 += f"; +-{np.mean([found[1] for found in tests]):.3f}" if tests else ""
        cells = [arm, ", ".join(map(str, sorted(seeds))), str(steps)]
        cells += [spread([MEASURES[name][1](run, steps) for run in runs]) for name in ("area", "end")]
        cells += [pass1, spread([found[2] for found in tests])]
        cells += [spread([_mean(series(run, "study/form"), -ENDS) for run in runs], 2)]
        cells += [spread([_mean(without_gradient(run), -ENDS) for run in runs], 2)]
        cells += [spread([_first(run, ENTROPY) for run in runs])]
        cells += [spread([_mean(series(run, KL), 0) for run in runs], 5)]
        cells += [spread([_mean(series(run, "response_length/mean"), -ENDS) for run in runs], 0)]
        cells += [spread([float(np.nanmedian(series(run, "timing_s/step"))) for run in runs], 1)]
        cells[-1] += ", shared" * any(map(shared, runs))
        cells += [", ".join(sorted({run["gpu"] for run in runs}))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mean(values: np.ndarray, start: int) -> float:
    kept = values[start:]
    return float(np.nanmean(kept)) if np.isfinite(kept).any() else np.nan


def at_once(arms: ByArm, measure: str) -> paired.Fit:
    """Of all whole runs without a tag; those of earlier packages count to their arm."""
    each = [run for seeds in arms.values() for run in seeds.values()]
    runs = [run for run in each if run["state"] == "done" and run["tag"] in ("", *EARLIER)]
    steps = min((len(run["metrics"]["step"]) for run in runs), default=0)
    rows = [(run["arm"], run["seed"], MEASURES[measure][1](run, steps)) for run in runs]
    return paired.Fit([row for row in rows if np.isfinite(row[2])])


def table_of_claims(arms: ByArm) -> list[str]:
    """What was claimed and what was found; behind it what no pair of runs tells yet."""
    heads = "| who | claim | compared | pairs of one seed: difference, 95 % interval | all runs at once | |"
    lines = [heads, "|---" * 6 + "|"]
    missing = []
    fits = {measure: at_once(arms, measure) for measure in MEASURES}
    for claim in CLAIMS:
        found = compare(arms, claim.arm, claim.other, claim.measure)
        if not found:
            if claim.other.partition(".")[2] not in EARLIER:  # there will be no more of those
                missing.append(f"{claim.arm} - {claim.other}")
            continue
        of_all = fits[claim.measure].difference(claim.arm, claim.other)
        cells = [claim.of, claim.text, f"{claim.arm} - {claim.other}: {MEASURES[claim.measure][0]}"]
        cells += [f"{found.n}: {with_interval(found)}", with_interval(of_all) if of_all else "-"]
        lines.append(f"| {' | '.join([*cells, paired.verdict(of_all or found, claim.kind, MARGIN)])} |")
    found_lines = [*lines, ""] if len(lines) > 2 else []
    return [*found_lines, f"Not measured: {', '.join(dict.fromkeys(missing)) or 'nothing'}."]


def with_interval(found: paired.Difference) -> str:
    """`+0.010 (-0.020 to +0.040)`."""
    interval = f" ({found.low:+.3f} to {found.high:+.3f})" if np.isfinite(found.low) else ""
    return f"{found.mean:+.3f}{interval}"


def best_and_worst(arms: ByArm) -> list[str]:
    """Names of the three best and worst runs, as they stand in the files."""
    runs = [run for seeds in arms.values() for run in seeds.values() if np.isfinite(_pass1(run, 0))]
    order = sorted(runs, key=lambda run: -_pass1(run, 0))
    named = [f"{run['name']} {_pass1(run, 0):.3f} ({run['session']['file']})" for run in order]
    shown = [f"Best by pass@1: {', '.join(named[:3])}.", f"Worst: {', '.join(named[-3:])}.", ""]
    return shown if len(named) >= 6 else []


def draw(arms: ByArm, out: Path) -> None:
    """Means of moving averages over the seeds, in a band from the smallest to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: list[tuple[str, Callable[[dict[str, Any]], np.ndarray]]] = [
        ("reward", lambda run: series(run, REWARD)),
        ("reward, by minutes of training", lambda run: series(run, REWARD)),
        ("groups without a gradient", without_gradient),
        ("entropy of the rollout", lambda run: series(run, ENTROPY)),
        ("KL(rollout || actor)", lambda run: series(run, KL)),
        ("tokens of an answer", lambda run: series(run, "response_length/mean")),
    ]
    figure, axes = plt.subplots(3, 2, figsize=(14, 13), layout="constrained")
    for axis, (title, values) in zip(axes.flat, panels, strict=True):
        for number, (arm, seeds) in enumerate(arms.items()):
            runs = list(seeds.values())
            steps = min(len(run["metrics"]["step"]) for run in runs)
            table = np.array([moving_average(values(run)[:steps].tolist()) for run in runs])
            at = np.arange(1, steps + 1, dtype=float)
            if "minutes" in title:
                at = np.mean([np.cumsum(series(run, "timing_s/step")[:steps]) for run in runs], axis=0) / 60
            style = "-" if number < 10 else "--"
            label = f"{arm} ({len(runs)}{', GPU shared' * any(map(shared, runs))})"
            (line,) = axis.plot(at, table.mean(0), style, linewidth=1.5, label=label)
            axis.fill_between(at, table.min(0), table.max(0), alpha=0.12, color=line.get_color(), linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("minutes" if "minutes" in title else "step")
        axis.grid(alpha=0.3)
    axes[2, 0].set_yscale("log")
    axes[0, 0].legend(fontsize=8, ncols=2)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def section(runs: Runs, folder: Path, least: int) -> list[str]:
    """The tables of all tasks; writes the pictures."""
    lines: list[str] = []
    for task, _ in itertools.groupby(sorted(run["task"] for run in runs.values())):
        arms = by_arm(runs, task, least)
        left_out = [name for name, run in runs.items() if run["task"] == task and len(run["metrics"]["step"]) < least]
        lines += [f"### {task}", ""]
        lines += [f"Left out, as they have fewer than {least} steps: {', '.join(left_out)}.", ""] if left_out else []
        if not arms:
            continue
        # Curves of earlier packages would hide others.
        draw({arm: arms[arm] for arm in arms if arm.partition(".")[2] not in EARLIER}, folder / f"{task}.png")
        lines += [*table_of_arms(arms), "", *table_of_claims(arms), "", *best_and_worst(arms)]
        lines += [f"![curves of {task}]({folder.name}/{task}.png)", ""]
    files = sorted({run["session"]["file"] for run in runs.values()})
    if files:
        lines += ["### What these runs do not measure", "", "| who | claim | |", "|---" * 3 + "|"]
        lines += [f"| {of} | {text} | {why} |" for of, text, why in NOT_BY_THESE_RUNS]
        lines += ["", f"Files: {', '.join(f'[{name}]({folder.name}/{name})' for name in files)}.", ""]
    return lines or ["No run is there yet.", ""]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder with result files")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the marks of the section")
    parser.add_argument("--least", type=int, default=20, help="steps that a run must have")
    args = parser.parse_args(arguments)
    if not args.results.is_dir() and args.results != parser.get_default("results"):
        raise ValueError(
            f"no such folder: --results={args.results}. One with files of run.py is accepted. Check the path."
        )
    runs = {name: run | {"name": name} for name, run in results.merged([args.results]).items()}
    before, begin, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"no place for the tables: {args.page} lacks {BEGIN.strip()} or {END.strip()}. Add both lines."
        )
    text = "\n".join(["", *section(runs, args.results, args.least)])
    args.page.write_text(before + begin + text + end + after, encoding="utf-8")
    print(f"{len(runs)} runs: {args.page}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")
