import json

import pytest

from verl_qerl.cli import main
from verl_qerl.cli.plot import first_and_last, moving_average, read_series


def write(path, rows):
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows))
    return path


@pytest.fixture
def metrics(tmp_path):
    rows = [
        (step, {"critic/score/mean": step / 10, "actor/entropy": 1.0, "aqn/sigma": 0.01, "note": "text"})
        for step in range(1, 9)
    ]
    return write(tmp_path / "metrics.jsonl", rows)


def test_the_table_the_means_and_the_picture(metrics, tmp_path, capsys):
    out = tmp_path / "deep" / "reward.png"
    assert main(["plot", str(metrics), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "critic/score/mean", "actor/entropy", "aqn/sigma"]
    assert lines[8].split() == ["8", "0.80000", "1.00000", "0.01000"]
    assert "critic/score/mean: mean of the first 5 steps 0.3000, of the last 5 steps 0.6000" in lines
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_noise_has_no_sigma_panel(tmp_path):
    path = write(tmp_path / "m", [(1, {"critic/rewards/mean": 0.5, "actor/entropy": 1.0})])
    assert list(read_series(path, None)) == ["critic/rewards/mean", "actor/entropy"]


def test_a_step_logged_twice_is_merged_and_the_later_value_wins(tmp_path):
    path = write(tmp_path / "m", [(1, {"a": 1.0, "b": 2.0}), (1, {"a": 3.0}), (2, {"a": 4.0})])
    assert read_series(path, ["a", "b"]) == {"a": {1: 3.0, 2: 4.0}, "b": {1: 2.0}}


def test_a_step_without_a_value_shows_a_dash(tmp_path, capsys):
    path = write(tmp_path / "m", [(1, {"a": 1.0, "b": 2.0}), (2, {"a": 4.0})])
    assert main(["plot", str(path), "--out", str(tmp_path / "x.png"), "--keys", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["2", "4.00000", "-"]


def test_the_moving_average_looks_back_only():
    assert moving_average([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]


def test_means_go_by_step_and_not_by_line():
    assert first_and_last({6: 0.0, 1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0, 5: 10.0}) == (10.0, 8.0)


@pytest.mark.parametrize("line", ['{"step": 1, "data": 5}', '{"step": "x", "data": {}}', '{"step": null, "data": {}}'])
def test_a_line_of_another_kind_is_named(tmp_path, line):
    (tmp_path / "m").write_text(line)
    with pytest.raises(ValueError, match=r"line 1 of \S+m cannot be used: (data|step)="):
        read_series(tmp_path / "m", None)


@pytest.mark.parametrize("name", ["x", "x.xyz", "."])
def test_a_name_of_no_picture_is_refused(metrics, tmp_path, capsys, name):
    with pytest.raises(SystemExit) as exit_info:
        main(["plot", str(metrics), "--out", str(tmp_path / name)])
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert f"no picture: out={tmp_path / name}. A name that ends in .png, .pdf, .svg is accepted." in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("keys", [[], ["--keys", "critic/score/mean"]])
def test_missing_metrics_are_named_with_those_there_are(tmp_path, capsys, keys):
    path = write(tmp_path / "m", [(1, {"perf/mfu": 0.5})])
    with pytest.raises(SystemExit) as exit_info:
        main(["plot", str(path), "--out", str(tmp_path / "x.png"), *keys])
    assert exit_info.value.code == 1
    message = capsys.readouterr().err
    assert "critic/score/mean" in message
    assert "It has ['perf/mfu']" in message
    assert not (tmp_path / "x.png").exists()


def test_a_missing_file_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path / "none"), "--out", str(tmp_path / "x.png")])
    assert "a file is missing: path=" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path), "--out", str(tmp_path / "x.png")])
    assert "a directory was given for a file: path=" in capsys.readouterr().err
