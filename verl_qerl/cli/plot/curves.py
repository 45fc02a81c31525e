"""Curves of runs: values of each metric per step, and their means and spread over the seeds of an arm."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_qerl.cli.data.rows import read_jsonl

WINDOW = 5  # steps of the moving average, and of the first and last means
STEP_TIME = "timing_s/step"
VALIDATION = re.compile(r"val-core/.+/mean@\d+")
# verl's timers within a step that do not lie in each other; what is left of the step is `other`.
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")
_RUN = re.compile(r"(?P<arm>.+)-seed(?P<seed>\d+)")

Series = dict[int, float]
Run = Mapping[str, Series]


def read_metrics(path: Path) -> dict[str, Series]:
    """Metric -> value of each step; says how many are left out since they are not finite.

    The file of a run that goes on may be read too.

    Args:
        path: Lines `{"step": ..., "data": {metric: value}}`; when a step occurs twice, later values win.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line is not such an object, or has a number that no float can hold.
    """
    found: dict[str, Series] = {}
    for row in read_jsonl(path, {"step": int, "data": dict}, is_growing=True):
        step = row["step"]
        for key, value in row["data"].items():
            if isinstance(value, int | float):
                try:
                    float(step)  # axes are of floats
                    found.setdefault(key, {})[step] = float(value)
                except OverflowError as error:
                    raise ValueError(
                        f"a number is too large: {key} at step {step} of metrics={path}. Those of a float are accepted."
                        " Mend or drop the line."
                    ) from error
    finite = {key: {step: one for step, one in series.items() if math.isfinite(one)} for key, series in found.items()}
    for key, series in finite.items():
        if count := len(found[key]) - len(series):
            print(f"left out of metrics={path}: {count} values of {key} that are not finite")
    return {key: series for key, series in finite.items() if series}


def by_arm(paths: Sequence[Path]) -> dict[str, dict[int, Path]]:
    """Arm -> seed -> file, in the order of the arms' first files; a name without `-seedN` is an arm of one run.

    Raises:
        ValueError: A run comes twice.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in paths:
        match = _RUN.fullmatch(path.stem)
        arm, seed = (match["arm"], int(match["seed"])) if match else (path.stem, 0)
        seeds = found.setdefault(arm, {})
        if seed in seeds:
            raise ValueError(
                f"a run comes twice: metrics={seeds[seed]} and {path}. One file for each arm and seed is accepted,"
                " named ARM-seedN.jsonl. Rename the file, or leave one out."
            )
        seeds[seed] = path
    return found


def summarize(seeds: Mapping[int, Run], keys: Sequence[str]) -> dict[str, Any]:
    """Numbers of one arm.

    Args:
        keys: Metrics that every run has.

    Returns:
        `seeds`; and for each metric `steps`, those that every seed has, `values` of each seed and step, `mean` and `sd`
        over the seeds of each step, `first` and `last`, [mean, sd] over the seeds of a seed's mean over WINDOW steps.
        The deviation is that of a sample, and 0 of a single seed.

    Raises:
        ValueError: The seeds have no step of a metric in common.
    """
    summary: dict[str, Any] = {"seeds": sorted(seeds)}
    for key in keys:
        runs = [run[key] for run in seeds.values()]
        steps = _common_steps(runs)
        if not steps:
            raise ValueError(
                f"the runs of an arm have no step in common: {key} of seeds={sorted(seeds)}. Runs over the same steps"
                " are accepted. Leave one out."
            )
        values = _values(runs, steps)
        ends = np.array([first_and_last({step: run[step] for step in steps}) for run in runs])
        summary[key] = {"steps": steps, "values": values.tolist()}
        summary[key] |= {"mean": values.mean(0).tolist(), "sd": _deviation(values).tolist()}
        summary[key] |= {
            name: [float(ends[:, i].mean()), float(_deviation(ends)[i])] for i, name in enumerate(("first", "last"))
        }
    return summary


def add_differences(
    summary: dict[str, dict[str, Any]], arms: Mapping[str, Mapping[int, Run]], keys: Sequence[str], baseline: str
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
    for arm, key in ((arm, key) for arm in arms if arm != baseline for key in keys):
        common = sorted(set(arms[arm]) & set(arms[baseline]))
        ours, theirs = ([arms[one][seed][key] for seed in common] for one in (arm, baseline))
        steps = _common_steps([*ours, *theirs])
        if not steps:
            raise ValueError(
                f"nothing to subtract: arm {arm} has no seed and step in common with baseline={baseline}. Runs with the"
                " same seeds are accepted. Leave out --baseline, or that arm."
            )
        difference = _values(ours, steps).mean(1) - _values(theirs, steps).mean(1)
        summary[arm][key]["minus_baseline"] = [float(difference.mean()), float(_deviation(difference))]


def phases(run: Run) -> dict[str, Series]:
    """Seconds of each phase of the steps; empty of a run without timers. Validation comes on top of a step."""
    whole = run.get(STEP_TIME, {})
    timed = {name: run[f"timing_s/{name}"] for name in PHASES if f"timing_s/{name}" in run}
    if not whole or not timed:
        return {}
    found = {name: {step: timed[name].get(step, 0.0) for step in whole} for name in timed}
    found["other"] = {step: max(0.0, all_ - sum(one[step] for one in found.values())) for step, all_ in whole.items()}
    if "timing_s/testing" in run:
        found["validation"] = {step: run["timing_s/testing"].get(step, 0.0) for step in whole}
    return found


def first_and_last(values: Series) -> tuple[float, float]:
    """Means over the first and over the last WINDOW steps."""
    ordered = [values[step] for step in sorted(values)]
    return float(np.mean(ordered[:WINDOW])), float(np.mean(ordered[-WINDOW:]))


def moving_average(values: Sequence[float]) -> list[float]:
    """Mean of each value and up to WINDOW - 1 before it."""
    return [float(np.mean(values[max(0, i + 1 - WINDOW) : i + 1])) for i in range(len(values))]


def _common_steps(runs: Sequence[Series]) -> list[int]:
    return sorted(set.intersection(*map(set, runs))) if runs else []


def _values(runs: Sequence[Series], steps: Sequence[int]) -> np.ndarray:
    return np.array([[run[step] for step in steps] for run in runs])


def _deviation(values: np.ndarray) -> np.ndarray:
    return values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1:])
