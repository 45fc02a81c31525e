import json
import re

import pyarrow.parquet as pq
import pytest
from word_problems import MAX_FACTOR, generate, main


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
        ({"num_problems": 5000, "max_steps": 1, "max_number": 2}, "different problems were found"),
    ],
)
def test_what_cannot_be_generated_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        generate(**({"num_problems": 10, "max_steps": 2, "max_number": 9, "seed": 0} | change))


def test_splits_do_not_overlap_and_repeat_with_the_seed(tmp_path):
    for out in ("a", "b"):
        assert main(["--num-train", "300", "--num-test", "100", "--out", str(tmp_path / out)]) == 0
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    questions = {split: {row["extra_info"]["question"] for row in found} for split, found in rows.items()}
    assert (len(questions["train"]), len(questions["test"])) == (300, 100)
    assert not questions["train"] & questions["test"]
    assert rows["train"] == pq.read_table(tmp_path / "b" / "train.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "a" / "test.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == [row["extra_info"]["answer"] for row in rows["test"]]


def test_verls_own_reward_gives_one_to_the_reference_answer(tmp_path):
    reward_score = pytest.importorskip("verl.utils.reward_score")
    assert main(["--num-train", "50", "--num-test", "20", "--out", str(tmp_path / "out")]) == 0
    for row in pq.read_table(tmp_path / "out" / "test.parquet").to_pylist():
        truth = row["reward_model"]["ground_truth"]
        assert reward_score.default_compute_score(row["data_source"], row["extra_info"]["answer"], truth) == 1.0
        assert reward_score.default_compute_score(row["data_source"], "#### 77", truth) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-test", "0"], "a split would be empty: --num-test=0"),
        (["--max-steps", "4"], "the number of steps is out of range: max_steps=4"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_write_nothing(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path / "out")])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
