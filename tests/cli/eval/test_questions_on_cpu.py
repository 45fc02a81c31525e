import json

import pytest
import word_problems

from verl_qerl.cli.eval.questions import Question, parse_tasks, question_of, read_questions

SUFFIX = "Let's think step by step and output the final answer within \\boxed{}."
CHAT = [{"role": "user", "content": f"How many? {SUFFIX}"}]
HOW_MANY = Question("How many?", "18")
NO_ANSWERS = ("true", "false", "NaN", "Infinity", '""', '" "')


@pytest.mark.parametrize(
    "row",
    [
        {"question": "How many?", "answer": "9 * 2 = 18\n#### 18"},  # GSM8K
        {"problem": "How many?", "answer": "18", "solution": "x"},  # MATH-500 and AIME of the hub
        {"problem": "How many?", "answer": 18, "extra_info": "from a book"},
        {"problem": "How many?", "answer": 18.0},  # as a column of numbers with gaps has it
        {"problem": "How many?", "answer": float("nan"), "solution": r"So \boxed{18}."},
        {"problem": "How many?", "solution": r"So \boxed{18}."},
        {"prompt": "How many?", "answer": "18", "source": "math"},
        # verl's schema, as others fill it; the instruction is there already in some.
        {"prompt": CHAT, "reward_model": {"ground_truth": "18"}, "extra_info": {"index": 0}},
        {"prompt": CHAT, "reward_model": {"ground_truth": {"question": "How many?", "target": "18"}}},
        {"prompt": CHAT, "reward_model": {"ground_truth": "18"}, "extra_info": {"question": "How many?"}},
    ],
)
def test_rows_of_many_kinds(tmp_path, row):
    (tmp_path / "aime24.json").write_text(json.dumps([row]))
    assert read_questions("aime24", tmp_path) == [HOW_MANY]


@pytest.mark.parametrize(("answer", "truth"), [(0.5, "0.5"), (-0.0, "0"), (0, "0"), (10**400, str(10**400))])
def test_a_number_as_text(answer, truth):
    assert question_of({"problem": "How many?", "answer": answer}, "row 1").truth == truth


def test_files_of_three_kinds(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"question": "How many?", "answer": "#### 18"}
    for task in ("gsm8k", "math500", "amc23"):
        (tmp_path / task).mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "math500" / "test.json").write_text(json.dumps([row]))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "amc23" / "test.parquet")
    assert [read_questions(task, tmp_path) for task in ("gsm8k", "math500", "amc23")] == [[HOW_MANY]] * 3


def test_what_data_writes_can_be_asked(tmp_path):
    assert word_problems.main(["--out", str(tmp_path / "gsm8k"), "--num-train", "2", "--num-test", "3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "gsm8k" / "test.jsonl").read_text().splitlines()]
    as_lines = read_questions("gsm8k", tmp_path)
    assert [one.text for one in as_lines] == [line["question"] for line in lines]
    (tmp_path / "gsm8k" / "test.jsonl").unlink()
    assert read_questions("gsm8k", tmp_path) == as_lines  # of the parquet


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"questions cannot be read: .*aime24\.json holds no objects\."),
        (
            '[{"text": "x"}]',
            r"row 1 of .* has no question: its columns are text, its answer is ''. Text or a number in question,",
        ),
        (
            '[{"problem": "x"}]',
            r"row 1 of .* has no answer: its columns are problem, its answer is ''. Text or a number in answer or",
        ),
        ('[{"problem": "x", "reward_model": "18"}]', r"row 1 of .* has no answer: its columns are problem, reward_m"),
        ('[{"prompt": ["x"], "answer": 18}]', r"row 1 of .* has no question: its columns are prompt, answer"),
        ('[{"problem": "x", "answer": ["18", "19"]}]', r"row 1 of .* has no answer: its columns are problem, answer"),
        *[(f'[{{"problem": "x", "answer": {one}}}]', "row 1 of .* has no answer") for one in NO_ANSWERS],
        (
            r'[{"problem": "x", "answer": "\\boxed{ }"}]',
            r"row 1 of .* has no answer: .*, its answer is '\\\\boxed\{ \}'\. Text",
        ),
        (json.dumps([{"problem": SUFFIX, "answer": 3}]), r"row 1 of .* has no question: .*, its answer is '3'"),
        ('{"a": 1}', "holds no objects"),
        ("[1]", "holds no objects"),
        ("[", r"questions cannot be read: .* Objects, as JSON or parquet, are accepted"),
    ],
)
def test_what_holds_no_questions_is_refused(tmp_path, content, message):
    (tmp_path / "aime24.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions("aime24", tmp_path)


def test_a_set_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"questions are missing: aime25 in --source=.* leave --source out"):
        read_questions("aime25", tmp_path)


def test_a_hub_that_does_not_answer(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"the hub did not answer: source=math-ai/amc23\. no route\. Give a directory"):
        read_questions("amc23", None)


def test_task_names():
    assert parse_tasks("gsm8k,math500,gsm8k") == ["gsm8k", "math500"]
    with pytest.raises(ValueError, match=r"unknown task: --tasks=gsm8k,gsm with gsm\. Accepted are gsm8k, math500,"):
        parse_tasks("gsm8k,gsm")
    with pytest.raises(ValueError, match=r"unknown task: --tasks=\. Accepted"):
        parse_tasks("")
