"""The picture of `plot`: a panel for each metric, and one for what the time of a step goes to."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_qerl.cli.plot.curves import VALIDATION, Series, moving_average

PICTURES = (".png", ".pdf", ".svg")
LOG_FROM = 30
SCHEDULES = ("aqn/sigma", "actor/lr")  # drawn as they are


def check_picture(out: Path) -> None:
    """Require a name that says what kind of picture it is; matplotlib adds an end to one that does not."""
    if out.suffix not in PICTURES:
        raise ValueError(f"no picture: out={out}. A name that ends in {', '.join(PICTURES)} is accepted. Change --out.")


def draw(
    summary: Mapping[str, Mapping[str, Any]],
    keys: Sequence[str],
    phases: Mapping[str, Series],
    questions: int | None,
    out: Path,
) -> None:
    """Draw the panels under a common step axis.

    Args:
        summary: Arm -> what `curves.summarize` returns.
        phases: From `curves.phases`; may be empty.
        questions: Number of questions in the validation set; None for no intervals.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = len(keys) + bool(phases)
    size = (8, 1.5 + 2.2 * count)
    figure, axes = plt.subplots(count, 1, sharex=True, squeeze=False, figsize=size, layout="constrained")
    for axis, key in zip(axes[:, 0], keys, strict=False):
        for arm, numbers in summary.items():
            label = f"{shown(arm)} ({len(numbers['seeds'])})"
            if VALIDATION.fullmatch(key):
                steps, mean, reach = numbers[key]["steps"], numbers[key]["mean"], half_widths(numbers[key], questions)
                axis.errorbar(steps, mean, yerr=reach, marker=".", capsize=3, linewidth=1.5, label=label)
            elif key in SCHEDULES:
                axis.plot(numbers[key]["steps"], numbers[key]["mean"], linewidth=1.5, label=label)
            else:
                _curve(axis, numbers[key], label)
        axis.set_yscale(scale_of(numbers[key]["mean"] for numbers in summary.values()))
        axis.set_title(key, loc="left", fontsize="medium")
        axis.grid(alpha=0.3)
    if phases:
        _stack(axes[-1, 0], phases)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, title="arm (seeds)")
    axes[-1, 0].set_xlabel("step")
    figure.savefig(out, dpi=150)
    plt.close(figure)


def shown(name: str) -> str:
    """A name as matplotlib writes it: a dollar sign would begin a formula, and a leading `_` leaves the legend out.

    It takes no bytes of another encoding, as file names may have.
    """
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$").encode(errors="replace").decode()


def scale_of(curves: Iterable[Sequence[float]]) -> str:
    """Scale of a panel with these curves: `log` where all are positive and they differ by LOG_FROM, else `linear`."""
    values = np.concatenate([np.array(curve) for curve in curves])
    return "log" if 0 < values.min() * LOG_FROM < values.max() else "linear"


def half_widths(numbers: Mapping[str, Any], questions: int | None) -> np.ndarray | None:
    """How far the error bars of a validation curve reach down and up, of shape (2, steps).

    One deviation over the seeds; of one seed Wilson's 95 % interval, as if each question had been answered once; None
    where the number of questions is not known, or the metric is no share.
    """
    from verl_qerl.cli.eval.statistics import wilson

    mean = np.array(numbers["mean"])
    if len(numbers["values"]) > 1:
        return np.stack([np.array(numbers["sd"])] * 2)
    if questions is None or mean.min() < 0 or mean.max() > 1:
        return None
    found = [wilson(one, questions) for one in mean.tolist()]
    return np.array([[one.mean - one.low for one in found], [one.high - one.mean for one in found]])


def _curve(axis: Any, numbers: Mapping[str, Any], label: str) -> None:
    """The moving average of the means: of one seed over its values, of several in a band of one deviation."""
    mean, sd = (np.array(moving_average(numbers[part])) for part in ("mean", "sd"))
    (line,) = axis.plot(numbers["steps"], mean, linewidth=1.5, label=label)
    if len(numbers["values"]) == 1:
        axis.plot(numbers["steps"], numbers["mean"], ".", markersize=4, alpha=0.5, color=line.get_color())
    else:
        axis.fill_between(numbers["steps"], mean - sd, mean + sd, alpha=0.15, color=line.get_color(), linewidth=0)


def _stack(axis: Any, phases: Mapping[str, Series]) -> None:
    steps = np.array(sorted(next(iter(phases.values()))), float)
    seconds = np.array([[values[step] for step in steps] for values in phases.values()])
    holes = 2 * (1 + np.flatnonzero(np.diff(steps) > 1))  # NaN there ends the areas
    ends = np.insert(np.add.outer(steps, (-0.5, 0.5)).ravel(), holes, np.nan)  # of each step
    axis.stackplot(ends, np.insert(np.repeat(seconds, 2, 1), holes, np.nan, 1), labels=phases, alpha=0.8)
    axis.set_ylim(top=1.4 * seconds.sum(0).max())  # room for the legend
    axis.set_title("seconds of a step", loc="left", fontsize="medium")
    axis.legend(loc="upper right", ncols=4, fontsize="small")
    axis.grid(alpha=0.3)
