import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_qerl.cli import main
from verl_qerl.cli.data.schema import MATH_INSTRUCTION

GSM8K_ROW = {"question": "What is 1,000 + 234?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"}
OTHER_ROW = {"question": "What is 2 + 3?", "answer": "#### 5"}
MATH_FIELDS = {"question": "What is half of one?", "solution": r"It is \boxed{1} halved, $\boxed{\frac{1}{2}}$."}


@pytest.fixture
def gsm8k(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.jsonl").write_text(json.dumps(OTHER_ROW) + "\n")
    (source / "test.jsonl").write_text(json.dumps(GSM8K_ROW) + "\n")
    return source


@pytest.fixture(params=["nested", "flat"])
def math(tmp_path, request):
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        rows = []
        for level in ("Level 2", "Level 3", "Level 5", "Level ?"):
            question = f"What is half of one, at {level} of {split}?"
            fields = {"reward_model": {"ground_truth": MATH_FIELDS | {"question": question}}}
            if request.param == "flat":
                fields = {"problem": question, "solution": MATH_FIELDS["solution"]}
            rows.append({"level": level, "type": "Algebra", **fields})
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
    assert json.loads((tmp_path / "out" / "train.jsonl").read_text()) == OTHER_ROW


def test_math_keeps_the_levels_asked_for(math, tmp_path):
    assert main(["data", "math", "--source", str(math), "--levels", "3-5", "--out", str(tmp_path / "out")]) == 0
    rows = read(tmp_path / "out" / "train.parquet")
    assert [row["extra_info"]["level"] for row in rows] == ["Level 3", "Level 5"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[0]["prompt"][0]["content"] == f"What is half of one, at Level 3 of train? {MATH_INSTRUCTION}"
    assert rows[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert rows[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


def test_questions_of_its_own_test_split_are_not_trained_on(gsm8k, tmp_path, capsys):
    rows = [OTHER_ROW, GSM8K_ROW | {"question": "what is 1,000+234"}, OTHER_ROW]
    (gsm8k / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "gsm8k", "--source", str(gsm8k), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "gsm8k: train has 3 rows, where 7473 are published" in printed
    assert "left out are 1 questions that come again, and of evaluation questions 1 of its test split" in printed
    assert [row["extra_info"]["question"] for row in read(tmp_path / "out" / "train.parquet")] == ["What is 2 + 3?"]
    assert len(read(tmp_path / "out" / "test.parquet")) == 1


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_a_line_ends_where_json_lines_end(gsm8k, tmp_path, separator):
    row = GSM8K_ROW | {"question": f"What{separator}is 1?"}
    (gsm8k / "test.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["data", "gsm8k", "--source", str(gsm8k), "--out", str(tmp_path / "out")]) == 0
    assert read(tmp_path / "out" / "test.parquet")[0]["extra_info"]["question"] == row["question"]


def write_math(folder, *rows):
    for split in ("train", "test"):
        asked = [row | {"question": row["question"] and f"{split}: {row['question']}"} for row in rows]
        pq.write_table(pa.Table.from_pylist(asked), folder / f"{split}.parquet")


def test_math_without_levels_and_types_is_taken(tmp_path):
    write_math(tmp_path, MATH_FIELDS)
    assert main(["data", "math", "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    (row,) = read(tmp_path / "out" / "test.parquet")
    assert set(row["extra_info"]) == {"split", "index", "question", "answer"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solution": None}, r"solution=None\. Accepted is str"),
        ({"question": None}, r"question=None\. Accepted is str"),
        ({"question": ""}, r"question=''\. Accepted is str that is not blank"),
        ({"level": None}, r"level=None\. Accepted is str"),
    ],
    ids=["solution", "question", "blank", "level"],
)
def test_a_math_row_that_lacks_something_is_named(tmp_path, refused, change, message):
    others = {"level": "Level 1", "type": "Algebra"}
    write_math(tmp_path, MATH_FIELDS | others, MATH_FIELDS | others | {"level": "Level 3"} | change)
    assert re.search(
        rf"row 2 of train cannot be used: {message}",
        refused("data", "math", "--source", tmp_path, "--levels", "3", "--out", tmp_path / "out"),
    )


def test_math_rows_with_an_empty_box_are_left_out_and_counted(tmp_path, capsys, refused):
    """MATH has two of them in its training split."""
    empty = {"question": "How many primes?", "solution": r"There are $\boxed{}$ primes."}
    write_math(tmp_path, MATH_FIELDS, empty, MATH_FIELDS | {"question": "What is half of two?"})
    assert main(["data", "math", "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "train: left out are 1 rows without an answer, the first of them row 2" in capsys.readouterr().out
    asked = [row["extra_info"]["question"] for row in read(tmp_path / "out" / "train.parquet")]
    assert asked == [f"train: {MATH_FIELDS['question']}", "train: What is half of two?"]
    write_math(tmp_path, empty)
    assert "no row of train has an answer. " in refused(
        "data", "math", "--source", tmp_path, "--out", tmp_path / "other"
    )


@pytest.mark.parametrize("truth", [{"answer": "3"}, {"reward_model": "3"}], ids=["answer", "reward_model"])
def test_math_without_solutions_is_refused(tmp_path, refused, truth):
    write_math(tmp_path, {"question": "?"} | truth)
    assert "row 1 of train cannot be used: solution=None." in refused(
        "data", "math", "--source", tmp_path, "--out", tmp_path / "out"
    )


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_verls_own_reward_gives_one_to_the_reference_answer(name, tmp_path):
    reward_score = pytest.importorskip("verl.utils.reward_score")
    math_row = {"level": "Level 4", "type": "Algebra", **MATH_FIELDS}
    for split, row in (("train", OTHER_ROW), ("test", GSM8K_ROW)):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    write_math(tmp_path, math_row)
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


DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {n} + 3?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
DAPO = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9a9b6eb4"}}
BIG_MATH = {"source": "orca_math", "domain": ["Mathematics -> Algebra"], "llama8b_solve_rate": 0.25}


def dapo(n, wrapped=True):
    """A row of BytedTsinghua-SIA/DAPO-Math-17k, or of what open-r1 made of it."""
    reward_model = {"ground_truth": str(n + 3), "style": "rule-lighteval/MATH_v2"}
    prompt = [{"role": "user", "content": DAPO_PROMPT.format(n=n)}]
    if wrapped:
        return DAPO | {"prompt": prompt, "reward_model": reward_model}
    plain = {"prompt": f"What is {n} + 3?", "solution": str(n + 3), "source_prompt": prompt}
    return DAPO | plain | {"reward_model": reward_model}


def big_math(n, processed=True):
    names = ("prompt", "solution") if processed else ("problem", "answer")
    return dict(zip(names, (f"What is {n} + 3?", f"\\frac{{{2 * n + 6}}}{{2}}"), strict=True)) | BIG_MATH


@pytest.mark.parametrize("row", [dapo, lambda n: dapo(n, False), big_math, lambda n: big_math(n, False)])
def test_a_large_set_becomes_verls_schema_and_its_rewards_read_it(tmp_path, capsys, row):
    reward_score = pytest.importorskip("verl.utils.reward_score")
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "what is 1  + 3", "answer": "#### 4"}))
    pq.write_table(pa.Table.from_pylist([row(n) for n in (0, 1, 2, 0)]), tmp_path / "train.parquet")
    name = "big-math" if "llama8b_solve_rate" in row(0) else "dapo-math"
    options = ["--source", str(tmp_path), "--held-out", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["data", name, *options]) == 0
    assert "train: left out are 1 questions that come again, and of evaluation questions 1 of gsm8k" in (
        printed := capsys.readouterr().out
    )
    assert f"{name}: train has 4 rows, where " in printed
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]
    found = read(tmp_path / "out" / "train.parquet")
    assert [one["extra_info"]["question"] for one in found] == ["What is 0 + 3?", "What is 2 + 3?"]
    assert [one["extra_info"]["index"] for one in found] == [0, 1]
    for one in found:
        question, truth = one["extra_info"]["question"], one["reward_model"]["ground_truth"]
        asked = f"{question} Let's think step by step and output the final answer within \\boxed{{}}."
        assert one["prompt"] == [{"role": "user", "content": asked}]
        assert right(reward_score, one, f"So it is \\boxed{{{truth}}}.") == 1
        assert right(reward_score, one, "So it is \\boxed{77}.") != 1


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path, capsys):
    rows = [big_math(1), big_math(2) | {"solution": " "}, big_math(3), {"prompt": "What?"}]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(GSM8K_ROW))
    options = ["--source", str(tmp_path), "--held-out", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["data", "big-math", *options]) == 0
    told = (
        r"train: left out are 2 rows without a question or an answer, the first of which: row 2 of .* has no answer: "
    )
    assert re.search(told, capsys.readouterr().out)
    assert len(read(tmp_path / "out" / "train.parquet")) == 2


@pytest.mark.parametrize("other", [{}, 10**400, ["x"], {"a": []}, None, True], ids=lambda other: repr(other)[:9])
def test_columns_beside_the_question_are_kept_where_they_are_of_their_kind(tmp_path, other):
    others = {"source": other, "llama8b_solve_rate": other}
    rows = [big_math(1) | others, big_math(2), big_math(3) | others | {"llama8b_solve_rate": "x"}]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(GSM8K_ROW))
    options = ["--source", str(tmp_path), "--held-out", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["data", "big-math", *options]) == 0
    found = [row["extra_info"] for row in read(tmp_path / "out" / "train.parquet")]
    assert [row["source"] for row in found] == [None, "orca_math", None]
    assert [row["llama8b_solve_rate"] for row in found] == [None, 0.25, None]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_what_is_nested_too_deeply_is_refused(tmp_path, refused, suffix):
    file = tmp_path / f"train.{suffix}"
    file.write_text("[" * 100_000)
    assert re.search(
        rf"(line 1 is not JSON: path=|questions cannot be read: ){file} \(maximum",
        refused("data", "big-math", "--source", file, "--out", tmp_path / "out"),
    )


def test_a_set_of_the_hub_with_other_columns_is_refused(tmp_path, refused, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"problem": "What?", "answer": "#### 3"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert ": row 1 of train cannot be used: question=None. Accepted is str that is not" in refused(
        "data", "gsm8k", "--source", "some/one", "--out", tmp_path / "out"
    )


def test_levels_of_big_math_are_the_hubs_files(tmp_path, capsys, refused, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([big_math(len(asked))])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(GSM8K_ROW))
    out = ["--held-out", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["data", "big-math", "--levels", "3-5", *out]) == 0
    hub = "open-r1/Big-Math-RL-Verified-Processed"
    assert asked == [(hub, f"level_{level}", "train") for level in (3, 4, 5)]
    assert len(read(tmp_path / "out" / "train.parquet")) == 3
    assert "are published" not in capsys.readouterr().out
    assert "levels are those of the hub: --levels with --source=" in refused(
        "data", "big-math", "--levels", "3", "--source", tmp_path / "gsm8k.jsonl", "--out", "x"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "absent"], r"a training set is missing: --source=absent\. A \.jsonl, \.json or \.parquet"),
        (
            ["--source", "{}/odd.json"],
            r"row 1 of \S+odd\.json has no answer: its columns are prompt, level, its answer is ''\.",
        ),
        (["--source", "{}/train.json", "--held-out", "{}"], r"no evaluation questions are found: --held-out="),
        (["--source", "{}/train.json", "--held-out", "{}/sets"], r"no training question is left: all are held out"),
        (["--source", "{}/train.json"], r"the hub did not answer: source=openai/gsm8k\. no route\. .* with --held-out"),
    ],
    ids=["source", "columns", "held-out", "nothing-left", "no-network"],
)
def test_a_large_set_that_cannot_be_made_is_one_sentence(tmp_path, refused, monkeypatch, arguments, message):
    datasets = pytest.importorskip("datasets")

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "amc23.json").write_text(json.dumps([big_math(1)]))
    (tmp_path / "train.json").write_text(json.dumps([big_math(1)]))
    (tmp_path / "odd.json").write_text(json.dumps([{"prompt": "What?", "level": 3}]))
    given = [argument.format(tmp_path) for argument in arguments]
    assert re.search(message, refused("data", "big-math", *given, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def right(reward_score, row, text):
    """1 for a right answer, by verl's own choice of a reward."""
    found = reward_score.default_compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
    return found["acc"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("\xff\xfe", "line 1 is not JSON"),
        (json.dumps(OTHER_ROW | {"question": "\ud83d"}), r"line 1 is not JSON: \S+ \(.*surrogates not allowed"),
        ('{"question": "?"}\n', r"line 1 lacks \['answer'\]"),
        (
            '{"question": "?", "answer": 3}\n',
            r"line 1 of \S+test\.jsonl cannot be used: answer=3\. Accepted is str",
        ),
        ("\n", "a file is empty"),
    ],
)
def test_damaged_input_is_refused_and_nothing_is_written(gsm8k, tmp_path, refused, content, message):
    (gsm8k / "test.jsonl").write_text(content, encoding="latin-1")
    assert re.search(message, refused("data", "gsm8k", "--source", gsm8k, "--out", tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_split_without_rows_is_refused(math, tmp_path, refused):
    for split in ("test", "train"):
        empty = pq.read_table(math / f"{split}.parquet").slice(0, 0)
        pq.write_table(empty, math / f"{split}.parquet")
        assert "parquet holds no objects." in refused("data", "math", "--source", math, "--out", tmp_path / "out")


def test_wrong_arguments_are_one_sentence(tmp_path, refused):
    given = ("data", "gsm8k", "--source", "no-such-directory", "--out", tmp_path / "out")
    assert "no such source: --source=no-such-directory. A directory with tr" in refused(*given)
    given = ("data", "math", "--levels", "7", "--out", tmp_path / "out")
    assert "levels=7. A-B with 1 <= A <= B <= 5" in refused(*given, code=2)


@pytest.mark.parametrize(("name", "suffix"), [("gsm8k", "jsonl"), ("math", "parquet")])
def test_a_file_for_a_directory_is_told_what_is_accepted(tmp_path, monkeypatch, refused, name, suffix):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for source in (str(tmp_path / "data" / "rows"), "data/rows"):  # the second has the form of a hub id
        assert refused("data", name, "--source", source, "--out", "out").endswith(
            f": a file was given for a directory: --source={source}. A directory with train.{suffix} and test.{suffix},"
            " or owner/name of the hub, is accepted. Check --source.\n"
        )


def test_earlier_output_is_refused(gsm8k, tmp_path, refused):
    assert "the output already exists" in refused("data", "gsm8k", "--source", gsm8k, "--out", gsm8k)
