"""What result files begin with."""

import json
import sys

import result_file
import torch


def test_says_what_was_measured(monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "abc1234")
    monkeypatch.setattr(result_file, "output_of", lambda command: "NVIDIA H200, 580.1\nNVIDIA H200, 580.1")
    head = result_file.header({"rows": 3})
    assert (head["gpu"], head["driver"], head["commit"]) == ("NVIDIA H200", "580.1", "abc1234")
    assert (head["versions"]["torch"], head["options"]) == (torch.__version__, {"rows": 3})
    monkeypatch.setattr(result_file, "output_of", lambda command: "")
    assert result_file.gpu_and_driver()[0].startswith("cpu ")


def test_a_command_that_is_missing_fails_or_hangs_says_nothing():
    assert result_file.output_of(["echo", "first"]) == "first"
    assert result_file.output_of(["no-such-command-here"]) == ""
    assert result_file.output_of([sys.executable, "-c", "print(1); exit(1)"]) == ""
    assert result_file.output_of(["sleep", "10"], seconds=0.1) == ""


def test_a_file_is_written_with_its_folder(tmp_path):
    result_file.write(tmp_path / "gpu" / "one.json", {"rows": []})
    assert json.loads((tmp_path / "gpu" / "one.json").read_text()) == {"rows": []}
