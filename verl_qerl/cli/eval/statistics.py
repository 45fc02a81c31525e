"""Accuracies of questions that were each answered several times, and what can be said of them."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verl_qerl.cli.eval.answers import Verdict, number
from verl_qerl.cli.eval.records import Answer

_Z = 1.959964  # 97.5 % quantile of the normal distribution
RESAMPLES = 10000
_AT_ONCE = 500  # bounds memory: 500 x 1,319 questions are 5 MB


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """Mean of the differences, its 95 % interval, and the p of no difference, two-sided."""

    mean: float
    low: float
    high: float
    p: float


def accuracy(shares: Sequence[float], samples: int) -> Interval:
    """Mean share of right answers, over questions.

    Answers to one question resemble each other, so that the variance is taken over questions: of their shares, whatever
    `samples` is. The interval is Wilson's (1927) for as many independent answers as have that variance, as in surveys
    with clusters (Korn and Graubard 1998); with one answer a question it is Wilson's own, and it has a width where all
    are right or none. Their allowance for few clusters is left out: in simulations with 8 to 16 answers a question the
    interval of 30 questions holds the truth in 94 % of cases, of 10 in 92 %, of 5 in 86 %.

    Args:
        shares: For each question, the share of its answers that are right, 0 to 1.
    """
    values = np.asarray(shares, dtype=float)
    mean, variance = float(values.mean()), float(values.var()) / len(values)
    most = len(values) * samples
    n = min(mean * (1 - mean) / variance, most) if variance else most
    if mean in (0.0, 1.0) or len(values) == 1:  # nothing tells how alike answers to one question are
        n = len(values)
    return wilson(mean, n)


def wilson(mean: float, n: float) -> Interval:
    """Wilson's interval (1927) of a share among `n` independent answers."""
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    # Rounding can put an end beyond a mean of 0 or 1.
    return Interval(mean, min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half)))


def pass_at(right: int, samples: int, k: int) -> float:
    """Probability that k of the answers, drawn without putting back, hold a right one (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[Answer | Verdict]) -> float:
    """Whether the most frequent answer is right; a share where several are as frequent. No answer is no vote.

    Right answers are the same, however they are written; wrong ones where their numbers or letters are.
    """
    votes = Counter(None if one.right else _form(one.answer) for one in answers if one.answer is not None)
    if not votes:
        return 0.0
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return (None in first) / len(first)


def _form(answer: str) -> str:
    value = number(answer)
    return "".join(answer.split()) if value is None else str(value)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Mean of theirs - ours, over the same questions, by a bootstrap over questions.

    Deviations are widened by sqrt(n / (n - 1)), since those of a sample are smaller than of what it was drawn from
    (Hesterberg 2015, section 4). p is the share of means around 0 that are as far from it.

    Where all questions have the same difference, a bootstrap knows no other. So the interval is of what others, from -1
    to 1, would make of the mean, were they as frequent as Wilson's interval of none allows: for no difference, Tango's
    (1998). p is then 1 less the level of the interval that ends at 0.

    Raises:
        ValueError: The questions are not as many, or fewer than two.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(
            f"{len(ours)} and {len(theirs)} questions cannot be paired. As many, and two at least, are accepted. Choose"
            " evaluations of the same questions."
        )
    values = np.asarray(theirs, dtype=float) - np.asarray(ours, dtype=float)
    n, mean = len(values), float(values.mean())
    alike = np.ptp(values) < 1e-12
    unseen = wilson(0.0, n).high if alike else 0.0
    random = np.random.default_rng(0)  # the same evaluations give the same numbers
    wider = math.sqrt(n / (n - 1))
    parts = [values[random.integers(n, size=(_AT_ONCE, n))].mean(1) for _ in range(RESAMPLES // _AT_ONCE)]
    deviations = (np.concatenate(parts) - mean) * wider
    low, high = np.quantile(deviations, [0.025, 0.975])
    as_far = np.count_nonzero(np.abs(deviations) >= abs(mean) - 1e-12)
    low, high = float(low) - unseen * (1 + mean), float(high) + unseen * (1 - mean)
    p = max((1 + int(as_far)) / (1 + RESAMPLES), math.erfc(math.sqrt(n * abs(mean) / 2)) if alike else 0.0)
    return Difference(mean, max(-1.0, mean + low), min(1.0, mean + high), p)
