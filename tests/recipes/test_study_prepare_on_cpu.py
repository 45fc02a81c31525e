"""The questions of recipes/study, from small local files."""

import json
import re

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ASKED = " Let's think step by step and output the final answer within \\boxed{}."


def made(folder, count=600):
    """GSM8K and MATH as published, and the names of some of MATH's test questions."""
    for name in ("gsm8k", "math"):
        (folder / name).mkdir()
    for split in ("train", "test"):
        lines = [{"question": f"{split} {n}?", "answer": f"so\n#### 1,{n:03}"} for n in range(count)]
        (folder / f"gsm8k/{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows = [
            {"problem": f"{split} {n}!", "solution": f"\\boxed{{\\frac{{1}}{{{n}}}}}", "level": f"Level {n % 5 + 1}"}
            for n in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"math/{split}.parquet")
    (folder / "math500.json").write_text(json.dumps([{"prompt": f"test {n}!"} for n in (7, 3)]))
    return ["--gsm8k", str(folder / "gsm8k"), "--math", str(folder / "math"), "--out", str(folder / "out")]


def read(folder, name):
    return pq.read_table(folder / "out" / name).to_pylist()


def test_both_tasks_have_one_prompt_and_truths_for_math_verify(study, tmp_path):
    assert study("prepare").main([*made(tmp_path), "--math500", str(tmp_path / "math500.json")]) == 0
    row = read(tmp_path, "gsm8k/train.parquet")[5]
    assert row["prompt"] == [{"role": "user", "content": f"train 5?{ASKED}"}]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("gsm8k", "1005")
    assert "answer" not in row["extra_info"]
    row = read(tmp_path, "math/test.parquet")[0]
    assert row["prompt"] == [{"role": "user", "content": f"test 7!{ASKED}"}]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("math", r"\frac{1}{7}")


def test_splits(study, tmp_path):
    study("prepare").main([*made(tmp_path), "--math500", str(tmp_path / "math500.json")])
    train = read(tmp_path, "math/train.parquet")
    assert {row["extra_info"]["level"] for row in train} == {"Level 3", "Level 4", "Level 5"}
    assert len(train) == 360
    assert len(read(tmp_path, "math/test.parquet")) == 2
    test, some = (read(tmp_path, f"gsm8k/{name}.parquet") for name in ("test", "val"))
    assert (len(test), len(some)) == (600, 256)
    assert all(row in test for row in some)


def test_texts_for_calibration_are_training_questions_with_solutions(study, tmp_path):
    study("prepare").main(made(tmp_path))
    lines = (tmp_path / "out/gsm8k/calibration.jsonl").read_text().splitlines()
    found = {json.loads(line)["text"] for line in lines}
    assert len(found) == 512
    assert found < {f"train {n}?{ASKED}\nso\n#### 1,{n:03}" for n in range(600)}


def test_without_the_file_of_math_500_some_are_drawn_the_same_each_time(study, tmp_path):
    drawn = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        study("prepare").main(made(tmp_path / name))
        drawn.append([row["prompt"][0]["content"] for row in read(tmp_path / name, "math/test.parquet")])
    assert len(drawn[0]) == 500
    assert drawn[0] == drawn[1]


def test_questions_that_are_not_in_math_are_refused(study, tmp_path, capsys):
    arguments = made(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps([{"problem": "Why?"}, {"problem": "test 3!"}]))
    with pytest.raises(SystemExit):
        study("prepare").main([*arguments, "--math500", str(tmp_path / "other.json")])
    assert re.search(r"1 of 2 questions of .*other\.json are not in MATH's test split", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", r"questions of --math500 cannot be read: \S+other\.json \("),
        ('{"a": 1}', "holds no objects"),
        ("[]", "holds no objects"),
        ('[{"text": "Why?"}]', "1 of 1 questions of .* are not in MATH's test split"),
    ],
)
def test_a_file_without_questions_is_named(study, tmp_path, capsys, content, told):
    arguments = made(tmp_path)
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(SystemExit):
        study("prepare").main([*arguments, "--math500", str(tmp_path / "other.json")])
    assert re.search(told, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_stays(study, tmp_path, capsys):
    arguments = made(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    with pytest.raises(SystemExit):
        study("prepare").main(arguments)
    assert "the output already exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("levels", [["Level 1", "Level 2"], None], ids=str)
def test_questions_that_are_all_too_easy_are_refused(study, tmp_path, capsys, levels):
    arguments = made(tmp_path)
    file = tmp_path / "math/train.parquet"
    easy = [
        row | {"level": levels[n % 2]} if levels else {"problem": row["problem"], "solution": row["solution"]}
        for n, row in enumerate(pq.read_table(file).to_pylist())
    ]
    pq.write_table(pa.Table.from_pylist(easy), file)
    with pytest.raises(SystemExit):
        study("prepare").main(arguments)
    assert "none has a `level` that is Level 3, Level 4, Level 5. MATH as published" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_questions_that_cannot_be_had(study, tmp_path, capsys):
    arguments = made(tmp_path)
    (tmp_path / "math/test.parquet").unlink()
    with pytest.raises(SystemExit):
        study("prepare").main(arguments)
    assert "math" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
