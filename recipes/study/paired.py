"""Differences between runs of the same seed."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the normal distribution's.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
MOST = 20  # differences of which all signs are tried


class Difference(NamedTuple):
    """Mean of the differences, its 95 % interval by Student's t, and the p of the exact sign-flip test, two-sided.

    The interval is infinite for one pair. p cannot be below 2 / 2^n: five seeds give 0.06 at least.
    """

    n: int
    mean: float
    low: float
    high: float
    p: float


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Of pairs, one a seed.

    Raises:
        ValueError: There are no pairs, or too many to try all signs.
    """
    values = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    n = len(values)
    if not 1 <= n <= MOST:
        raise ValueError(f"{n} pairs cannot be compared. 1 to {MOST} are accepted. Choose the runs.")
    mean = float(values.mean())
    half = math.inf
    if n > 1:
        t = T_975[n - 2] if n - 2 < len(T_975) else 1.96
        half = t * float(values.std(ddof=1)) / math.sqrt(n)
    flipped = np.array(list(itertools.product((1, -1), repeat=n))) @ values / n
    p = float(np.mean(np.abs(flipped) >= abs(mean) - 1e-12))
    return Difference(n, mean, mean - half, mean + half, p)


def verdict(found: Difference | None, kind: str, margin: float) -> str:
    """What a comparison says of a claim.

    Args:
        found: None where there are no pairs.
        kind: `more`: yes where all of the interval is above 0. `good`: where it is above -margin.
        margin: See kind.
    """
    if found is None or found.n < 3:
        return "not measured" if found is None else f"too few seeds ({found.n})"
    limit = 0.0 if kind == "more" else -margin
    if found.low > limit:
        return "**yes**"
    return "**no**" if found.high < limit else "not shown"
