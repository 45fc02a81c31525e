import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_qerl.cli import main
from verl_qerl.cli.data import gsm8k_ground_truth, last_boxed

GSM8K_ROW = {"question": "What is 1,000 + 234?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"}
MATH_FIELDS = {"question": "What is half of one?", "solution": r"It is \boxed{1} halved, $\boxed{\frac{1}{2}}$."}


@pytest.fixture
def gsm8k(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text(json.dumps(GSM8K_ROW) + "\n")
    return source


@pytest.fixture(params=["nested", "flat"])
def math(tmp_path, request):
    source = tmp_path / "source"
    source.mkdir()
    rows = []
    for level in ("Level 2", "Level 3", "Level 5", "Level ?"):
        fields = {"reward_model": {"ground_truth": MATH_FIELDS}}
        if request.param == "flat":
            fields = {"problem": MATH_FIELDS["question"], "solution": MATH_FIELDS["solution"]}
        rows.append({"level": level, "type": "Algebra", **fields})
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), source / f"{split}.parquet")
    return source


def read(path):
    return pq.read_table(path).to_pylist()


def test_gsm8k_has_verls_schema_prompt_and_ground_truth(gsm8k, tmp_path):
    assert main(["data", "gsm8k", "--source", str(gsm8k), "--out", str(tmp_path / "out")]) == 0
    (row,) = read(tmp_path / "out" / "test.parquet")
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": GSM8K_ROW["question"]
                + ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {"split": "test", "index": 0, **GSM8K_ROW},
    }
    assert json.loads((tmp_path / "out" / "train.jsonl").read_text()) == GSM8K_ROW


def test_math_keeps_the_levels_asked_for(math, tmp_path):
    assert main(["data", "math", "--source", str(math), "--levels", "3-5", "--out", str(tmp_path / "out")]) == 0
    rows = read(tmp_path / "out" / "train.parquet")
    assert [row["extra_info"]["level"] for row in rows] == ["Level 3", "Level 5"]
    assert rows[0]["prompt"][0]["content"] == (
        "What is half of one? Let's think step by step and output the final answer within \\boxed{}."
    )
    assert rows[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert rows[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_a_line_ends_where_json_lines_end(gsm8k, tmp_path, separator):
    row = GSM8K_ROW | {"question": f"What{separator}is 1?"}
    (gsm8k / "test.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["data", "gsm8k", "--source", str(gsm8k), "--out", str(tmp_path / "out")]) == 0
    assert read(tmp_path / "out" / "test.parquet")[0]["extra_info"]["question"] == row["question"]


def write_math(folder, *rows):
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def test_math_without_levels_and_types_is_taken(tmp_path):
    write_math(tmp_path, MATH_FIELDS)
    assert main(["data", "math", "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    (row,) = read(tmp_path / "out" / "test.parquet")
    assert set(row["extra_info"]) == {"split", "index", "question", "answer"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solution": None}, r"solution=None\. A str is accepted"),
        ({"question": None}, r"question=None\. A str"),
        ({"level": None}, r"level=None\. A str"),
    ],
    ids=["solution", "question", "level"],
)
def test_a_math_row_that_lacks_something_is_named(tmp_path, capsys, change, message):
    others = {"level": "Level 1", "type": "Algebra"}
    write_math(tmp_path, MATH_FIELDS | others, MATH_FIELDS | others | {"level": "Level 3"} | change)
    with pytest.raises(SystemExit) as exit_info:
        main(["data", "math", "--source", str(tmp_path), "--levels", "3", "--out", str(tmp_path / "out")])
    assert exit_info.value.code == 1
    assert re.search(rf"row 2 of train cannot be used: {message}", capsys.readouterr().err)


def test_math_without_solutions_is_refused(tmp_path, capsys):
    write_math(tmp_path, {"problem": "?", "answer": "3"})
    with pytest.raises(SystemExit) as exit_info:
        main(["data", "math", "--source", str(tmp_path), "--out", str(tmp_path / "out")])
    assert exit_info.value.code == 1
    assert "row 1 of train cannot be used: solution=None." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_verls_own_reward_gives_one_to_the_reference_answer(name, tmp_path):
    reward_score = pytest.importorskip("verl.utils.reward_score")
    math_row = {"level": "Level 4", "type": "Algebra", **MATH_FIELDS}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(GSM8K_ROW))
        pq.write_table(pa.Table.from_pylist([math_row]), tmp_path / f"{split}.parquet")
    assert main(["data", name, "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    for row in read(tmp_path / "out" / "test.parquet"):
        truth = row["reward_model"]["ground_truth"]
        assert reward_score.default_compute_score(row["data_source"], row["extra_info"]["answer"], truth) == 1.0
        assert reward_score.default_compute_score(row["data_source"], "#### 77 \\boxed{77}", truth) == 0.0


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "amc23"])
def test_an_evaluation_set_is_asked_and_scored_by_its_box(name, tmp_path):
    reward_score = pytest.importorskip("verl.utils.reward_score")
    rows = [{"problem": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(2)]
    (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    assert main(["data", name, "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.parquet"]
    found = read(tmp_path / "out" / "test.parquet")
    assert len(found) == 2
    for row, given in zip(found, rows, strict=True):
        asked = f"{given['problem']} Let's think step by step and output the final answer within \\boxed{{}}."
        assert row["prompt"] == [{"role": "user", "content": asked}]
        assert right(reward_score, row, f"So it is \\boxed{{{given['answer']}}}.") == 1
        assert right(reward_score, row, "So it is \\boxed{77}.") != 1


def right(reward_score, row, text):
    """1 for a right answer, by verl's own choice of a reward."""
    found = reward_score.default_compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
    return found["acc"] if isinstance(found, dict) else found


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
    with pytest.raises(ValueError, match="an answer has no result: answer='7'"):
        gsm8k_ground_truth("7")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"question": "?"}\n', r"line 1 lacks \['answer'\]"),
        ('{"question": "?", "answer": 3}\n', r"line 1 of \S+test\.jsonl cannot be used: answer=3\. A str is accepted"),
        ("\n", "a file is empty"),
    ],
)
def test_damaged_input_is_refused_and_nothing_is_written(gsm8k, tmp_path, capsys, content, message):
    (gsm8k / "test.jsonl").write_text(content)
    with pytest.raises(SystemExit) as exit_info:
        main(["data", "gsm8k", "--source", str(gsm8k), "--out", str(tmp_path / "out")])
    assert exit_info.value.code == 1
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "--source", "no-such-directory"], "no such source: source=no-such-directory"),
        (["math", "--levels", "7"], "levels=7. A-B with 1 <= A <= B <= 5"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["data", *arguments, "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err


def test_earlier_output_is_refused(gsm8k, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["data", "gsm8k", "--source", str(gsm8k), "--out", str(gsm8k)])
    assert "the output already exists" in capsys.readouterr().err
