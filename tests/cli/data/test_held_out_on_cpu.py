import pytest

from verl_qerl.cli.data.held_out import kept, plain


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("Evaluate $\\log_8 2$.", "evaluate\n$\\log_82$", True),
        ("What is $88 \\div (4 \\div 2)$?", "What is $88 \\div 4 \\div 2$?", False),
        ("What is 3 - 2?", "What is 3 + 2?", False),
        ("What is 1.5?", "What is 15?", False),
    ],
)
def test_which_questions_are_the_same(ours, theirs, same):
    assert (plain(ours) == plain(theirs)) is same


def test_what_is_left_out_is_counted(capsys):
    questions = ["A?", "b", "a", "c $x$", "D", "E"]
    assert kept(questions, {"aime24": ["cx", "unseen"], "amc23": ["CX", "d."]}) == [0, 1, 5]
    assert capsys.readouterr().out == (
        "train: left out are 1 questions that come again, and of evaluation questions 1 of aime24, 1 of amc23\n"
    )
    assert kept(["A", "B"], {}) == [0, 1]
    assert "left out are 0 questions that come again, and of evaluation questions none" in capsys.readouterr().out
