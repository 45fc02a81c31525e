"""Differences between arms: of runs of the same seed, and of all runs at once."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Difference(NamedTuple):
    """Mean of `n` differences (or of so many runs of each arm), and its 95 % interval by Student's t."""

    n: int
    mean: float
    low: float
    high: float


def quantile(free: int, comparisons: int = 1) -> float:
    """Of Student's t with so many degrees of freedom: where both tails are 5 %, shared by the comparisons."""
    return float(stats.t.ppf(1 - 0.025 / comparisons, free))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Of pairs, one a seed. The interval of one pair is infinite.

    Raises:
        ValueError: There are no pairs.
    """
    values = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    n = len(values)
    if not n:
        raise ValueError("no pairs can be compared. 1 or more are accepted. Choose the runs.")
    half = quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    mean = float(values.mean())
    return Difference(n, mean, mean - half, mean + half)


class Fit:
    """Least squares with a term for each arm and one for each seed; the spread of a run is taken to be that of all.

    Args:
        rows: (arm, seed, value) of all runs.
        marked: Of each run, whether it has what another term is for.
    """

    def __init__(self, rows: Sequence[tuple[str, int, float]], marked: Sequence[bool] | None = None) -> None:
        self.arms = [arm for arm, _, _ in rows]
        self._names = sorted(set(self.arms))
        seeds = sorted({seed for _, seed, _ in rows})[1:]
        table = [[arm == name for name in self._names] + [seed == each for each in seeds] for arm, seed, _ in rows]
        if marked is not None:
            table = [[*row, mark] for row, mark in zip(table, marked, strict=True)]
        terms, values = np.array(table, dtype=float), np.array([value for _, _, value in rows])
        # Less than all terms where runs of some arms share no seed with runs of others.
        self.free = len(rows) - (int(np.linalg.matrix_rank(terms)) if rows else 0)
        if self.free > 0:
            self._solve = np.linalg.pinv(terms, rcond=1e-10)
            self._found, self._held = self._solve @ values, self._solve @ terms
            self.spread = math.sqrt(float(np.sum((values - terms @ self._found) ** 2)) / self.free)

    def difference(self, arm: str, other: str) -> Difference | None:
        """None where the runs cannot tell it; n is the number of runs of the arm that has fewer."""
        if self.free <= 0 or not {arm, other} <= set(self._names):
            return None
        signs = np.zeros(len(self._found))
        signs[self._names.index(arm)], signs[self._names.index(other)] = 1, -1
        if not np.allclose(signs @ self._held, signs):  # it may be the arm, or the seed
            return None
        mean = float(signs @ self._found)
        half = quantile(self.free) * self.spread * float(np.linalg.norm(signs @ self._solve))
        return Difference(min(map(self.arms.count, (arm, other))), mean, mean - half, mean + half)


def verdict(found: Difference | None, kind: str, margin: float) -> str:
    """What a comparison says of a claim.

    Args:
        found: None where there is nothing to compare.
        kind: `more`: yes where all of the interval is above 0. `good`: where it is above -margin; lower where below 0.
        margin: See kind.
    """
    if found is None or found.n < 3:
        return "not measured" if found is None else f"too few seeds ({found.n})"
    limit = 0.0 if kind == "more" else -margin
    if found.low > limit:
        return "**yes**"
    if found.high < limit:
        return "**no**"
    return "**lower**" if found.high < 0 else "not shown"
