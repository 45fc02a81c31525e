"""Tables and curves of all result files of the study, and the figures that the pages tell of them.

python3 recipes/study/report.py    # reads results/, writes the pictures there and the figures of both pages
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
from arms import ARMS, FULL
from claims import CLAIMS, EARLIER, LORA, MARGIN, NOT_BY_THESE_RUNS
from findings import PAGES, figures_of, filled
from measures import (
    ENDS,
    ENTROPY,
    KL,
    LONG,
    MEASURES,
    REWARD,
    ByArm,
    Runs,
    accuracy,
    at_once,
    by_arm,
    compare,
    final_pass1,
    mean,
    series,
    with_interval,
    without_gradient,
)

from verl_qerl.cli.output_dir import new_file
from verl_qerl.cli.plot.curves import moving_average

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: written by report.py -->\n", "<!-- end of results -->\n"


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
        cells += [spread([mean(series(run, "study/form")[-ENDS:]) for run in runs], 2)]
        cells += [spread([mean(without_gradient(run)[-ENDS:]) for run in runs], 2)]
        cells += [spread([mean(series(run, ENTROPY)[:ENDS]) for run in runs])]
        cells += [spread([mean(series(run, KL)) for run in runs], 5)]
        cells += [spread([mean(series(run, "response_length/mean")[-ENDS:]) for run in runs], 0)]
        cells += [spread([float(np.nanmedian(series(run, "timing_s/step"))) for run in runs], 1)]
        cells[-1] += ", shared" * any(map(shared, runs))
        cells += [", ".join(sorted({run["gpu"] for run in runs}))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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


def best_and_worst(arms: ByArm) -> list[str]:
    """Names of the three best and worst runs, as they stand in the files."""
    runs = [run for seeds in arms.values() for run in seeds.values() if np.isfinite(final_pass1(run))]
    order = sorted(runs, key=lambda run: -final_pass1(run))
    named = [f"{run['name']} {final_pass1(run):.3f} ({run['session']['file']})" for run in order]
    shown = [f"Best by pass@1: {', '.join(named[:3])}.", f"Worst: {', '.join(named[-3:])}.", ""]
    return shown if len(named) >= 6 else []


def pictures(arms: ByArm) -> dict[str, ByArm]:
    """What is drawn together: arms with LoRA, and those that train all weights beside bf16's LoRA."""
    # Curves of earlier packages would hide others.
    drawn = {arm: seeds for arm, seeds in arms.items() if arm.partition(".")[2] not in EARLIER}
    full = {arm: seeds for arm, seeds in drawn.items() if FULL[0] in ARMS[arm.partition(".")[0]]}
    lora = {arm: seeds for arm, seeds in drawn.items() if arm not in full}
    beside = {arm: lora[arm] for arm in lora if arm == LORA}
    return {kind: shown for kind, shown in (("lora", lora), ("all_weights", full and full | beside)) if shown}


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
    with new_file(out) as file:
        figure.savefig(file, dpi=110)
    plt.close(figure)


def section(runs: Runs, folder: Path) -> list[str]:
    """The tables of all tasks; writes the pictures."""
    lines: list[str] = []
    for task, _ in itertools.groupby(sorted(run["task"] for run in runs.values())):
        arms, left_out = by_arm(runs, task)
        lines += [f"### {task}", ""]
        if left_out:
            lines += [
                f"Left out, with less than {100 * LONG:.0f} % of the longest run's steps: {', '.join(left_out)}.",
                "",
            ]
        if not arms:
            continue
        lines += [*table_of_arms(arms), "", *table_of_claims(arms), "", *best_and_worst(arms)]
        for kind, shown in pictures(arms).items():
            draw(shown, folder / f"{task}_{kind}.png")
            lines += [f"![curves of {task}, {kind}]({folder.name}/{task}_{kind}.png)", ""]
    files = sorted({run["session"]["file"] for run in runs.values()})
    if files:
        lines += ["### What these runs do not measure", "", "| who | claim | |", "|---" * 3 + "|"]
        lines += [f"| {of} | {text} | {why} |" for of, text, why in NOT_BY_THESE_RUNS]
        lines += ["", f"Files: {', '.join(f'[{name}]({folder.name}/{name})' for name in files)}.", ""]
    return lines or ["No run is there yet.", ""]


def _replace(page: Path, text: str) -> None:
    with new_file(page) as file:
        file.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder with result files")
    parser.add_argument("--page", type=Path, help="page with the marks of the section; of results/: README.md")
    args = parser.parse_args(arguments)
    ours = args.results.resolve() == parser.get_default("results")  # the texts are about these
    if not args.results.is_dir() and not ours:
        raise ValueError(
            f"no such folder: --results={args.results}. One with files of run.py is accepted. Check the path."
        )
    if not ours and not args.page:
        raise ValueError(
            f"no page for --results={args.results}: README.md tells of the study's own runs. A file with the lines"
            f" {BEGIN.strip()} and {END.strip()} is accepted. Make one, and name it with --page."
        )
    runs = results.merged([args.results])
    for run in runs.values():
        if run["arm"] not in ARMS:
            raise ValueError(
                f"no arm of the study: {run['arm']}, of {run['name']} in {run['session']['file']}. Those in arms.py"
                " are accepted. Add a line there, or take the file away."
            )
        if max(run["metrics"]["step"], default=0) > 0 and REWARD not in run["metrics"]:
            raise ValueError(
                f"no result of the study: {run['name']} in {run['session']['file']} has steps without {REWARD}."
                f" {results.REMEDY}"
            )
    told: dict[Path, str] = {}  # before anything is written, as a figure may be missing
    if ours:
        figures = figures_of(runs, args.results)
        told = {page: filled(page.read_text(encoding="utf-8"), figures) for page in PAGES}
    page = (args.page or PAGES[0]).resolve()
    before, begin, rest = (told.pop(page, "") or page.read_text(encoding="utf-8")).partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no place for the tables: {page} lacks {BEGIN.strip()} or {END.strip()}. Add both lines.")
    text = "\n".join(["", *section(runs, args.results)])
    _replace(page, before + begin + text + end + after)
    for other, filled_in in told.items():
        _replace(other, filled_in)
    print(f"{len(runs)} runs: {page}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")
