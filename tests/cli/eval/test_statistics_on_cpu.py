"""Intervals hold what they say: on small examples, and in simulations with a known truth."""

import itertools
import math

import numpy as np
import pytest

from verl_qerl.cli.eval.answers import Verdict
from verl_qerl.cli.eval.statistics import accuracy, majority, paired, pass_at


def test_with_one_answer_a_question_the_interval_is_wilsons():
    # Newcombe (1998), table I: 81 of 263.
    found = accuracy([1.0] * 81 + [0.0] * 182, samples=1)
    assert found == pytest.approx((81 / 263, 0.2553, 0.3662), abs=5e-5)
    # As many answers, but the four of each question are alike: they count once.
    four = accuracy([1.0] * 81 + [0.0] * 182, samples=4)
    assert four == found


def test_an_interval_has_a_width_where_all_are_right_or_none():
    assert accuracy([0.0] * 30, 8).high == pytest.approx(0.1135, abs=1e-3)
    assert accuracy([1.0] * 30, 8).low == pytest.approx(0.8865, abs=1e-3)
    assert accuracy([0.5] * 30, 8) == pytest.approx(accuracy([1.0] * 120 + [0.0] * 120, 1))


def test_answers_to_one_question_are_one_answer():
    # Nothing tells how they vary from question to question; 0.469 to 0.531 would be of 1,000 independent ones.
    assert accuracy([0.5], 1000)[1:] == pytest.approx((0.0545, 0.9455), abs=1e-3)


def answered(random, questions, samples, shift=0.0):
    """Shares of right answers to questions as hard as they come: chances from Beta(0.8, 1.2), mean 0.4."""
    chances = random.beta(0.8, 1.2, questions)
    moved = np.clip(chances + shift * random.random(questions), 0, 1)
    return (random.binomial(samples, one, questions) / samples for one in (chances, moved))


@pytest.mark.parametrize(("questions", "samples"), [(30, 8), (200, 1), (200, 4)])
def test_the_interval_covers_the_truth(questions, samples):
    random = np.random.default_rng(0)
    found = [accuracy(next(answered(random, questions, samples)), samples) for _ in range(1000)]
    covered = np.mean([one.low <= 0.4 <= one.high for one in found])
    assert 0.925 < covered < 0.975  # 0.95, and three standard errors


def test_answers_to_one_question_are_not_taken_for_independent():
    random = np.random.default_rng(1)
    shares = list(next(answered(random, 100, 32)))
    alone = accuracy([1.0] * round(sum(shares) * 32) + [0.0] * (3200 - round(sum(shares) * 32)), 1)
    found = accuracy(shares, 32)
    assert found.high - found.low > 3 * (alone.high - alone.low)


@pytest.mark.parametrize("questions", [30, 200])
def test_the_paired_test_has_its_level_and_its_interval_its_coverage(questions):
    random = np.random.default_rng(2)
    same = [paired(*answered(random, questions, 4)) for _ in range(400)]
    level = np.mean([one.p < 0.05 for one in same])
    covered = np.mean([one.low <= 0 <= one.high for one in same])
    assert 0.02 < level < 0.085  # 0.05, and three standard errors of 400 runs
    assert 0.915 < covered < 0.98


def test_the_paired_test_sees_a_difference_that_single_intervals_hide():
    random = np.random.default_rng(3)
    runs = [(list(a), list(b)) for a, b in (answered(random, 200, 8, shift=0.1) for _ in range(40))]
    found = [paired(a, b) for a, b in runs]
    assert np.mean([one.p < 0.05 for one in found]) > 0.8
    assert np.mean([accuracy(b, 8).low > accuracy(a, 8).high for a, b in runs]) < 0.1
    assert paired(*runs[0]).mean == pytest.approx(-paired(*reversed(runs[0])).mean)


def test_a_difference_has_a_width_where_all_questions_have_the_same():
    none = paired([0.0] * 30, [0.0] * 30)
    assert (none.mean, none.low, none.p) == (0, -none.high, 1)
    assert none.high == accuracy([0.0] * 30, 1).high
    assert paired([0.0, 1.0] * 15, [0.0, 1.0] * 15) == none
    every, less = paired([0.0] * 30, [1.0] * 30), paired([0.5] * 30, [0.25] * 30)
    assert every[:3] == pytest.approx((1, 1 - 2 * none.high, 1))
    assert less[:3] == pytest.approx((-0.25, -0.25 - 0.75 * none.high, -0.25 + 1.25 * none.high))


@pytest.mark.parametrize("share", [1.0, -1.0, 0.25])
def test_p_and_the_interval_agree_where_all_questions_have_the_same_difference(share):
    for n in range(2, 25):
        found = paired([max(0.0, -share)] * n, [max(0.0, share)] * n)
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
    assert paired([0.0] * 3, [1.0] * 3).p == pytest.approx(0.083, abs=5e-4)  # McNemar's: chi-square 3 of 1 degree


def test_no_interval_goes_beyond_what_shares_can_differ_by():
    for found in (paired([0, 1, 0], [1, 0, 0]), paired([0, 0, 0], [1, 0, 1])):
        assert -1 <= found.low < found.mean < found.high <= 1
    assert paired([0, 0, 1], [1, 0, 1]).high == 1


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match=r"^2 and 3 questions cannot be paired\. .* Choose evaluations"):
        paired([0, 1], [0, 1, 1])


@pytest.mark.parametrize(("right", "samples", "k"), [(0, 4, 2), (1, 4, 2), (3, 6, 4), (6, 6, 1), (2, 5, 5)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right, samples, k):
    flags = [1] * right + [0] * (samples - right)
    draws = list(itertools.combinations(flags, k))
    assert pass_at(right, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert math.isclose(pass_at(right, samples, 1), right / samples)


def votes(*answers):
    return [Verdict(text, right, True) for text, right in answers]


@pytest.mark.parametrize(
    ("verdicts", "share"),
    [
        (votes(("3", False), ("3", False), ("4", True)), 0),
        (votes(("3", False), ("4", True), ("8/2", True)), 1),  # right ones are one answer
        (votes(("7", False), ("7.0", False), ("4", True)), 0),  # so are wrong ones of one number
        (votes(("3", False), ("4", True)), 0.5),
        ([*votes(("4", True)), Verdict(None, False, False), Verdict(None, False, False)], 1),
        ([Verdict(None, False, False)] * 3, 0),
    ],
)
def test_the_majority_is_of_answers(verdicts, share):
    assert majority(verdicts) == share
