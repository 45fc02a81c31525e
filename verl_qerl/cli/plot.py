"""`plot`: reward, entropy and noise of a run, from the JSON lines of verl's `file` logger."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_qerl.cli.data import read_jsonl

# The first key a run has stands for the panel; entropy and sigma are left out when a run has none.
PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "entropy": ("actor/entropy",),
    "sigma": ("aqn/sigma",),
}
PICTURES = (".png", ".pdf", ".svg")
WINDOW = 5  # steps of the moving average, and of the first and last means

Series = dict[int, float]


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("plot", help="print and plot reward, entropy and noise of a run")
    parser.add_argument("metrics", type=Path, help="JSON lines of verl's `file` logger")
    parser.add_argument("--out", type=Path, required=True, help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--keys", nargs="+", help="metrics to show instead; the first one is averaged")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table and the first and last means, and write the picture."""
    check_picture(args.out)
    series = read_series(args.metrics, args.keys)
    for line in table(series):
        print(line)
    name, values = next(iter(series.items()))
    first, last = first_and_last(values)
    count = min(WINDOW, len(values))
    print(f"{name}: mean of the first {count} steps {first:.4f}, of the last {count} steps {last:.4f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(series, args.out)
    print(f"wrote {args.out}")
    return 0


def check_picture(out: Path) -> None:
    """Require a name that says what kind of picture it is; matplotlib adds an end to one that does not.

    Raises:
        ValueError: It has another end, or none.
    """
    if out.suffix not in PICTURES:
        raise ValueError(f"no picture: out={out}. A name that ends in {', '.join(PICTURES)} is accepted. Change --out.")


def read_series(path: Path, keys: Sequence[str] | None) -> dict[str, Series]:
    """Values per step of each metric.

    Args:
        path: Lines `{"step": ..., "data": {metric: value}}`; when a step occurs twice, later values win.
        keys: Metrics that have to be there; None takes the first known one per panel.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line is not such an object, or a metric is missing.
    """
    found: dict[str, Series] = {}
    for row in read_jsonl(path, {"step": int, "data": dict}):
        for key, value in row["data"].items():
            if isinstance(value, int | float):
                found.setdefault(key, {})[row["step"]] = float(value)
    if keys is None:
        candidates = (next((key for key in known if key in found), None) for known in PANELS.values())
        keys = [key for key in candidates if key is not None]
        missing = [] if keys and keys[0] in PANELS["reward"] else list(PANELS["reward"])
    else:
        missing = [key for key in keys if key not in found]
    if missing:
        raise ValueError(
            f"metrics are missing: keys={missing} in {path}. It has {sorted(found)}. Choose from these with --keys."
        )
    return {key: found[key] for key in keys}


def table(series: dict[str, Series]) -> list[str]:
    """A header and one line per step that has any of the metrics."""
    lines = [" ".join(["  step", *(f"{name:>18}" for name in series)])]
    for step in sorted(set().union(*series.values())):
        cells = (f"{values[step]:>18.5f}" if step in values else f"{'-':>18}" for values in series.values())
        lines.append(" ".join([f"{step:>6}", *cells]))
    return lines


def first_and_last(values: Series) -> tuple[float, float]:
    """Means over the first and over the last WINDOW steps."""
    ordered = [values[step] for step in sorted(values)]
    return float(np.mean(ordered[:WINDOW])), float(np.mean(ordered[-WINDOW:]))


def moving_average(values: Sequence[float]) -> list[float]:
    """Mean of each value and up to WINDOW - 1 before it."""
    return [float(np.mean(values[max(0, i + 1 - WINDOW) : i + 1])) for i in range(len(values))]


def draw(series: dict[str, Series], out: Path) -> None:
    """One panel per metric under a common step axis; the first has a moving average."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(series), 1, sharex=True, squeeze=False, figsize=(7, 1 + 2.2 * len(series)))
    for index, (axis, (name, values)) in enumerate(zip(axes[:, 0], series.items(), strict=True)):
        steps = sorted(values)
        ordered = [values[step] for step in steps]
        axis.plot(steps, ordered, marker=".", linewidth=1, alpha=0.5 if index == 0 else 1.0)
        if index == 0:
            axis.plot(steps, moving_average(ordered), linewidth=2, label=f"mean of {WINDOW} steps")
            axis.legend(loc="best")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    plt.close(figure)
