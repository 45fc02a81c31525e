import re

import pytest

from verl_qerl.cli.word_problems import MAX_FACTOR, generate


def test_every_line_of_every_answer_is_true_and_the_last_is_the_result():
    for problem in generate(500, max_steps=3, max_number=9, seed=0):
        *lines, result = problem.answer.split("\n")
        values = [line.split("=") for line in lines]
        assert all(eval(left) == int(right) for left, right in values)
        assert result == f"#### {values[-1][1]}"
        assert int(values[-1][1]) >= 0


def test_the_question_holds_the_numbers_of_the_answer():
    for problem in generate(300, max_steps=3, max_number=9, seed=1):
        steps = [re.split(r"[-+*=]", line) for line in problem.answer.split("\n")[:-1]]
        used = sorted([steps[0][0], *(step[1] for step in steps)])
        asked = sorted(re.findall(r"\d+", problem.question))
        assert used == asked


@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_steps_reach_the_largest_number_asked_for(max_steps):
    problems = generate(300, max_steps=max_steps, max_number=9, seed=2)
    assert {problem.answer.count("\n") for problem in problems} == set(range(1, max_steps + 1))


def test_numbers_stay_in_range():
    numbers = {int(n) for p in generate(500, max_steps=2, max_number=6, seed=3) for n in re.findall(r"\d+", p.question)}
    assert max(numbers) == 6
    assert max(numbers) > MAX_FACTOR


def test_questions_differ_and_a_seed_repeats_them():
    first = generate(2000, max_steps=2, max_number=9, seed=4)
    assert len({problem.question for problem in first}) == 2000
    assert first == generate(2000, max_steps=2, max_number=9, seed=4)
    assert first != generate(2000, max_steps=2, max_number=9, seed=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_problems": 0}, "num_problems=0"),
        ({"max_steps": 4}, "max_steps=4"),
        ({"max_number": 1}, "max_number=1"),
        ({"num_problems": 50000, "max_steps": 1, "max_number": 2}, "different problems were found"),
    ],
)
def test_what_cannot_be_generated_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        generate(**({"num_problems": 10, "max_steps": 2, "max_number": 9, "seed": 0} | change))
