import errno
import json
from pathlib import Path

import pytest

from verl_qerl.checkpoints import record
from verl_qerl.cli.eval.questions import Question
from verl_qerl.cli.eval.records import Answer, Answered, append, check_questions, open_records, read_lines

QUESTIONS = [Question(f"What is {n} + 1?", str(n + 1)) for n in range(3)]


def line(index, right=True):
    return Answered(index, QUESTIONS[index], (Answer("x", 3, False, "1", right, True),))


def test_lines_come_back_in_the_order_of_the_set(tmp_path):
    for index in (2, 0, 1):
        append(tmp_path, "gsm8k", line(index))
    assert read_lines(tmp_path, "gsm8k") == [line(0), line(1), line(2)]
    assert read_lines(tmp_path, "amc23") == []


def test_a_full_disk_is_told_by_its_file(tmp_path):
    file = tmp_path / "gsm8k.jsonl"
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as told:
        append(tmp_path, "gsm8k", line(0))
    assert told.value.filename == str(file)


def test_a_line_that_was_cut_short_is_asked_again_and_the_next_one_is_whole(tmp_path):
    append(tmp_path, "gsm8k", line(0))
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(file.read_text() + '{"index": 1, "ques')
    before = file.read_bytes()
    assert read_lines(tmp_path, "gsm8k") == [line(0)]
    assert file.read_bytes() == before  # `--compare` reads what another process may be writing
    (tmp_path / "settings.json").write_text("{}")
    open_records(tmp_path, {})
    append(tmp_path, "gsm8k", line(1))
    assert read_lines(tmp_path, "gsm8k") == [line(0), line(1)]


@pytest.mark.parametrize(
    "text", ["{}", "no", "\xff", '{"index": 0, "question": {"text": "a", "truth": "b"}, "answers": []}']
)
def test_a_damaged_line_is_named(tmp_path, text):
    append(tmp_path, "gsm8k", line(0))
    with (tmp_path / "gsm8k.jsonl").open("a", encoding="latin-1") as file:
        file.write(text + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*gsm8k\.jsonl is damaged"):
        read_lines(tmp_path, "gsm8k")


def test_a_question_that_is_answered_twice_is_named(tmp_path):
    append(tmp_path, "gsm8k", line(1))
    append(tmp_path, "gsm8k", line(1))
    with pytest.raises(ValueError, match=r"line 2 of .* answers question 1 again"):
        read_lines(tmp_path, "gsm8k")


def test_lines_of_another_set_are_refused():
    check_questions([line(2)], QUESTIONS, "here")
    for other in (QUESTIONS[:2], [*QUESTIONS[:2], Question("What is 2 + 1?", "4")]):
        with pytest.raises(ValueError, match="here has another question 2 than this set: 'What is 2"):
            check_questions([line(2)], other, "here")


def test_an_evaluation_goes_on_with_its_settings_alone(tmp_path):
    out = tmp_path / "out"
    open_records(out, {"model": "none", "samples": 4})
    open_records(out, {"model": "a", "samples": 4})  # nothing was answered, as where the first model is not found
    append(out, "gsm8k", line(0))
    open_records(out, {"model": "a", "samples": 4})
    with pytest.raises(ValueError, match=r"samples was 4 and is now 8\. The same settings"):
        open_records(out, {"model": "a", "samples": 8})
    for damaged in ("{", "[]"):
        (out / "settings.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"settings\.json .*A JSON object is accepted\. Choose another --out"):
            open_records(out, {"model": "a"})


def test_a_full_disk_does_not_bar_the_folder(tmp_path, monkeypatch):
    def full(file, content):
        Path(file).write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(record, "write_json", full)
        with pytest.raises(OSError, match="No space left") as told:
            open_records(tmp_path, {"model": "a"})
    assert told.value.filename == str(tmp_path / "settings.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".settings.json.partial").write_text("{")  # of one that was killed
    open_records(tmp_path, {"model": "a"})
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_what_is_no_evaluation_is_left_alone(tmp_path):
    (tmp_path / "file").write_text(json.dumps({}))
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="the output already exists and is no evaluation"):
            open_records(out, {"model": "a"})


@pytest.mark.parametrize("content", ['{"editor.fontSize": 14}', "[]", "{} // mine"])
def test_settings_of_something_else_are_left_alone(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises((FileExistsError, ValueError), match="Choose another"):
        open_records(tmp_path, {"model": "a"})
    assert (tmp_path / "settings.json").read_text() == content
