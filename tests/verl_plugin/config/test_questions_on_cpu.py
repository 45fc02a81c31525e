"""Files of questions that a run cannot use are refused by verl's check of a run, before Ray starts."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

pytest.importorskip("verl")

OURS = "+aqn.enabled=true"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Names of a file of four questions, of one of five, of a damaged one and of none."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, count in (("four", 4), ("five", 5)):
        pq.write_table(pa.table({"prompt": ["?"] * count}), tmp_path / f"{name}.parquet")
    (tmp_path / "damaged.parquet").write_text("no parquet")
    return {name: str(tmp_path / f"{name}.parquet") for name in ("four", "five", "damaged", "none", "f*")}


@pytest.mark.parametrize("names", [["four"], ["five", "five"]], ids=str)
def test_fewer_questions_than_a_step_takes_are_refused(validate, files, names):
    found = json.dumps([files[name] for name in names])
    options = (f"data.train_files={found}", "data.train_max_samples=7")  # of 4 and 10; a step takes 8
    with pytest.raises(ValueError, match=rf"^data\.train_batch_size=8 is more than the [47] questions of .*{names[0]}"):
        validate(OURS, *options)
    validate(*options)
    validate(OURS, *options, "+data.custom_cls.path=mine.py")
    validate(OURS, *options, "trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    few = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=4")
    validate(OURS, *options, *few)


@pytest.mark.parametrize("option", ["train_files", "val_files"])
@pytest.mark.parametrize("name", ["damaged", "none", "none.jsonl", "none.json"])
def test_a_file_that_cannot_be_read_is_refused(validate, files, option, name):
    files |= {name: files["none"].replace("none.parquet", name) for name in ("none.jsonl", "none.json")}
    with pytest.raises(
        ValueError, match=rf"^data\.{option}={re.escape(files[name])} cannot be read: .* Check the path"
    ):
        validate(OURS, f"data.{option}={files[name]}")
    with pytest.raises(FileNotFoundError):  # what verl says once Ray runs
        load_dataset("json", data_files=files["none.jsonl"])


@pytest.mark.parametrize("option", ["train_files", "val_files"])
def test_a_file_of_another_kind_is_refused(validate, files, option):
    for name in (str(Path(files["five"]).parent), "hdfs://host/five.csv"):
        with pytest.raises(
            ValueError, match=rf"^data\.{option}={name} is of no kind .* in \.parquet, \.json, \.jsonl is"
        ):
            validate(OURS, f"data.{option}={name}")
        validate(f"data.{option}={name}")
    validate(OURS, f"data.{option}=hdfs://host/five.jsonl")


@pytest.mark.parametrize("option", ["train_files", "val_files"])
def test_a_file_without_the_column_of_the_questions_is_refused(validate, files, option):
    named = f"data.{option}={files['five']}"
    with pytest.raises(
        ValueError, match=rf"^{re.escape(named)} has no column data\.prompt_key=question: it has prompt\. "
    ):
        validate(OURS, named, "data.prompt_key=question")
    validate(named, "data.prompt_key=question")


@pytest.mark.parametrize("option", ["train_files", "val_files"])
def test_no_questions_are_refused(validate, files, option):
    empty = files["four"].replace("four", "empty")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(ValueError, match=rf"^data\.{option}={re.escape(empty)} has no questions\. "):
        validate(OURS, f"data.{option}={empty}")
    for nothing in ("null", "[]"):
        with pytest.raises(
            ValueError, match=rf"^data\.{option}=(None|\[\]) names no file, without which verl does not"
        ):
            validate(OURS, f"data.{option}={nothing}")
        validate(f"data.{option}={nothing}")


def test_a_file_that_verls_data_set_takes_for_a_pattern_is_refused(validate, files):
    folder = Path(files["five"]).parent / "run[1]"
    folder.mkdir()
    file = shutil.copy(files["five"], folder)
    with pytest.raises(ValueError, match="data_files are invalid"):
        load_dataset("parquet", data_files=file)
    with pytest.raises(ValueError, match=rf"^data\.train_files={re.escape(file)} has brackets, .* Rename the file"):
        validate(OURS, f"data.train_files='{file}'")
    validate(f"data.train_files='{file}'")


@pytest.mark.parametrize("name", ["hdfs://none.parquet", "hdfs://none.jsonl", "f*", "f[io]ve.parquet", "fou?.parquet"])
def test_other_files_are_left_to_verl(validate, files, name):
    validate(OURS, f"data.train_files=['{files.get(name, name)}']")
