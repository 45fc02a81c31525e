import pytest

from verl_qerl.cli.data.schema import gsm8k_ground_truth, last_boxed


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (r"so $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"is $\boxed 5$ here", "5"),
        (r"\fbox{x}", "x"),
    ],
)
def test_last_boxed(solution, expected):
    assert last_boxed(solution) == expected


@pytest.mark.parametrize("solution", ["nothing", r"\boxed{open"])
def test_a_solution_without_a_result_is_refused(solution):
    with pytest.raises(ValueError, match="a solution has no result"):
        last_boxed(solution)


def test_an_answer_without_a_result_is_refused():
    for answer in ("7", "#### ,", "#### -."):
        with pytest.raises(ValueError, match=f"an answer has no result: answer='{answer}'"):
            gsm8k_ground_truth(answer)
