import pytest

from verl_qerl.testing import load_beside

greedy = load_beside(__file__, "greedy_cases")


def test_tokens_are_compared_up_to_the_first_that_differs():
    one = [[(1, -1.0), (2, -1.0), (3, -1.0)], [(4, -2.0), (5, -2.0), (6, -2.0)]]
    other = [[(1, -1.5), (2, -1.0), (3, -1.25)], [(4, -2.0), (7, -2.5), (8, -9.0)]]
    differences, agreed = greedy.compare(one, other)
    assert differences == [0.5, 0.0, 0.25, 0.0, 0.5]
    assert agreed == pytest.approx(4 / 5)


def test_answers_of_other_lengths_are_no_pair():
    with pytest.raises(ValueError, match="longer"):
        greedy.compare([[(1, -1.0)]], [[(1, -1.0)], [(2, -1.0)]])
