"""What is measured of a run, and compared between arms."""

from collections.abc import Callable
from typing import Any

import numpy as np
import paired
import results
from claims import EARLIER

ENDS = 10  # steps of the first and last means
LONG = 0.95  # share of the steps of the longest run of its task that a run needs to be looked at
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


def last_validation(run: dict[str, Any]) -> dict[str, Any]:
    """What was found with the test questions."""
    return run["validation"][max(run["validation"], key=int)]


def accuracy(run: dict[str, Any]) -> tuple[float, float, float] | None:
    """Of the last validation: pass@1, half of its 95 % interval over the questions, and pass@samples."""
    if not run["validation"]:
        return None
    found = last_validation(run)
    shares = np.array([int(digit) for digit in found["right"]]) / found["samples"]
    half = 1.96 * shares.std(ddof=1) / np.sqrt(len(shares)) if len(shares) > 1 else np.nan
    return float(shares.mean()), float(half), float((shares > 0).mean())


def final_pass1(run: dict[str, Any], steps: int = 0) -> float:
    """pass@1 of a whole run, NaN of another."""
    found = accuracy(run)
    return found[0] if found and run["state"] == "done" else np.nan


def final_pass4(run: dict[str, Any]) -> float:
    """pass@4 of a whole run with four answers to each test question, NaN of another."""
    found = accuracy(run)
    return found[2] if found and run["state"] == "done" and last_validation(run)["samples"] == 4 else np.nan


# Name -> what it is, and its value of a run whose first so many steps are looked at.
MEASURES: dict[str, tuple[str, Callable[[dict[str, Any], int], float]]] = {
    "area": ("mean reward of all steps", lambda run, n: mean(series(run, REWARD)[:n])),
    "end": (f"reward, last {ENDS} steps", lambda run, n: mean(series(run, REWARD)[max(0, n - ENDS) : n])),
    "pass1": ("pass@1 on the test set", final_pass1),
    "pass4": ("pass@4 on the test set", lambda run, _: final_pass4(run)),
    "early": (f"mean reward of steps 1 to {ENDS}", lambda run, _: mean(series(run, REWARD)[:ENDS])),
    "gain": ("reward of steps 2 and 3 less that of step 1", lambda run, _: gained(run)),
    "late": (f"mean reward after step {ENDS}", lambda run, n: mean(series(run, REWARD)[ENDS:n])),
    "entropy": (f"entropy of the rollout, first {ENDS} steps", lambda run, _: mean(series(run, ENTROPY)[:ENDS])),
    "entropy_then": ("entropy of the rollout, steps 7 to 12", lambda run, _: mean(series(run, ENTROPY)[6:12])),
    "entropy_late": ("entropy of the rollout after step 30", lambda run, n: mean(series(run, ENTROPY)[30:n])),
}


def gained(run: dict[str, Any]) -> float:
    """Reward of steps 2 and 3, when the adapter is young, less that of step 1."""
    values = series(run, REWARD)
    return float(values[1:3].mean() - values[0])


def mean(values: np.ndarray) -> float:
    """Of the values that there are, NaN where there is none."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan


def compare(arms: ByArm, arm: str, other: str, measure: str) -> paired.Difference | None:
    """Over the seeds that both have, and the steps that all of these runs have; None where there is nothing."""
    seeds = sorted(set(arms.get(arm, {})) & set(arms.get(other, {})))
    steps = min((len(arms[name][seed]["metrics"]["step"]) for name in (arm, other) for seed in seeds), default=0)
    value = MEASURES[measure][1]
    pairs = [(value(arms[arm][seed], steps), value(arms[other][seed], steps)) for seed in seeds]
    pairs = [pair for pair in pairs if np.isfinite(pair).all()]
    return paired.difference(*zip(*pairs, strict=True)) if pairs else None


def by_arm(runs: Runs, task: str) -> tuple[ByArm, list[str]]:
    """Runs of a task that are LONG, in the order of their names; and the names of the others."""
    steps = {name: len(run["metrics"]["step"]) for name, run in runs.items() if run["task"] == task}
    least = max(1, LONG * max(steps.values(), default=0))
    found: ByArm = {}
    for run in (runs[name] for name in steps if steps[name] >= least):
        found.setdefault(results.arm_of(run), {})[run["seed"]] = run
    return found, [name for name in steps if steps[name] < least]


def of_arms(arms: ByArm) -> list[dict[str, Any]]:
    """Those that count to their arm: without a tag, or of an earlier package."""
    return [run for seeds in arms.values() for run in seeds.values() if run["tag"] in ("", *EARLIER)]


def at_once(arms: ByArm, measure: str, marked: Callable[[dict[str, Any]], bool] | None = None) -> paired.Fit:
    """Of all runs without a tag, over the steps that they share; earlier packages count to their arm.

    Args:
        arms: Runs.
        measure: Of MEASURES.
        marked: Whether a run has what another term is for.
    """
    kept = of_arms(arms)
    common = min((len(run["metrics"]["step"]) for run in kept), default=0)
    found = [(run, value) for run in kept if np.isfinite(value := MEASURES[measure][1](run, common))]
    rows = [(run["arm"], run["seed"], value) for run, value in found]
    return paired.Fit(rows, [marked(run) for run, _ in found] if marked else None)


def with_interval(found: paired.Difference) -> str:
    """`+0.010 (-0.020 to +0.040)`."""
    interval = f" ({found.low:+.3f} to {found.high:+.3f})" if np.isfinite(found.low) else ""
    return f"{found.mean:+.3f}{interval}"
