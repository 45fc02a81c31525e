import errno
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from verl_qerl.cli import main
from verl_qerl.cli.plot.command import arm_table, default_keys
from verl_qerl.cli.plot.curves import summarize


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
    assert lines[8].split() == ["8", "0.80000", "1.0000", "0.010000"]
    assert "critic/score/mean: mean of the first 5 steps 0.3000, of the last 5 steps 0.6000" in lines
    assert out.read_bytes().startswith(b"\x89PNG")


def test_default_panels_are_those_that_all_runs_have():
    run = {name: {1: 0.5} for name in ("critic/rewards/mean", "actor/entropy", "rollout_corr/k3_kl", "timing_s/step")}
    shown = ["critic/rewards/mean", "rollout_corr/k3_kl", "actor/entropy"]
    assert default_keys([run]) == shown
    validated = run | {"val-core/openai/gsm8k/acc/mean@1": {1: 0.5}, "val-aux/openai/gsm8k/reward/mean@1": {1: 0.5}}
    noisy = validated | {"aqn/sigma": {1: 0.5}, "actor/kl_loss": {1: 0.5}}
    assert default_keys([noisy]) == [
        "critic/rewards/mean",
        "val-core/openai/gsm8k/acc/mean@1",
        "rollout_corr/k3_kl",
        "actor/kl_loss",
        "actor/entropy",
        "aqn/sigma",
    ]
    assert default_keys([noisy, run]) == [*shown, "timing_s/step"]
    assert default_keys([noisy, noisy | {"actor/entropy": {2: 0.5}}]).count("actor/entropy") == 0  # at no common step


def test_a_step_without_a_value_shows_a_dash(tmp_path, capsys):
    path = write(tmp_path / "m", [(1, {"a": 1.0, "b": 2.0}), (2, {"a": 4.0})])
    assert main(["plot", str(path), "--out", str(tmp_path / "x.png"), "--keys", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["2", "4.0000", "-"]


def test_small_numbers_keep_their_digits(tmp_path, capsys):
    path = write(tmp_path / "m", [(1, {"kl": 1.132e-6})])
    assert main(["plot", str(path), "--out", str(tmp_path / "x.png"), "--keys", "kl"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["1", "1.1320e-06"]
    assert table[2] == "kl: mean of the first 1 steps 1.132e-06, of the last 1 steps 1.132e-06"


def test_a_run_that_diverged_is_drawn_and_its_numbers_are_json(tmp_path, capsys):
    timed = {"critic/score/mean": 0.5, "timing_s/step": 10.0, "timing_s/gen": 6.0, "actor/entropy": 1.0}
    bad = {"timing_s/step": math.inf, "timing_s/gen": math.inf, "actor/entropy": math.nan}
    path, numbers = write(tmp_path / "m", [(1, timed), (2, timed | bad), (3, timed)]), tmp_path / "numbers.json"
    assert main(["plot", str(path), "--out", str(tmp_path / "x.png"), "--json", str(numbers)]) == 0
    assert "2            0.50000                  -" in capsys.readouterr().out

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(numbers.read_text(), parse_constant=refuse)["m"]
    assert found["actor/entropy"]["steps"] == [1, 3]


@pytest.mark.parametrize("name", ["x", "x.xyz", "."])
def test_a_name_of_no_picture_is_refused(metrics, tmp_path, capsys, name):
    with pytest.raises(SystemExit) as exit_info:
        main(["plot", str(metrics), "--out", str(tmp_path / name)])
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert f"no picture: out={tmp_path / name}. A name that ends in .png, .pdf, .svg is accepted." in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("score", [{}, {"critic/score/mean": None}], ids=["absent", "NaN"])  # verl writes NaN as null
@pytest.mark.parametrize("keys", [[], ["--keys", "critic/score/mean"]])
def test_missing_metrics_are_named_with_those_there_are(tmp_path, refused, keys, score):
    path = write(tmp_path / "m", [(1, {"perf/mfu": 0.5} | score)])
    message = refused("plot", path, "--out", tmp_path / "x.png", *keys)
    assert "metrics are missing, or NaN in every step: keys=['critic/score/mean'] in " in message
    assert "It has ['perf/mfu']" in message
    assert not (tmp_path / "x.png").exists()


def test_the_numbers_do_not_replace_the_metrics(metrics, tmp_path, refused):
    before = metrics.read_text()
    assert f"the metrics would be lost: --json={metrics}. Another file is accepted." in refused(
        "plot", metrics, "--out", tmp_path / "a.png", "--json", tmp_path / "." / metrics.name
    )
    assert metrics.read_text() == before


def test_the_numbers_do_not_replace_the_picture(metrics, tmp_path, refused):
    assert "the picture would be lost: --json=" in refused(
        "plot", metrics, "--out", tmp_path / "a.png", "--json", tmp_path / "." / "a.png"
    )
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("broken", ["picture", "numbers"])
def test_a_disk_that_is_full_leaves_what_was_there(metrics, tmp_path, capsys, monkeypatch, broken):
    picture, numbers = tmp_path / "a.png", tmp_path / "a.json"
    picture.write_text("earlier picture")
    numbers.write_text("earlier numbers")
    find = {"picture": (Figure, "savefig"), "numbers": (Path, "write_text")}[broken]

    def fill(self, *arguments, **options):
        path = arguments[0] if broken == "picture" else self
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*find, fill)
    with pytest.raises(SystemExit, match="1"):
        main(["plot", str(metrics), "--out", str(picture), "--json", str(numbers)])
    out = picture if broken == "picture" else numbers
    assert f"cannot be used: {out} (No space left on device)" in capsys.readouterr().err
    assert out.read_bytes() == f"earlier {broken}".encode()
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.json", metrics.name}


def test_the_numbers_go_into_a_pipe_and_through_a_link(metrics, tmp_path):
    program = [sys.executable, "-m", "verl_qerl", "plot", str(metrics), "--out", str(tmp_path / "link.png")]
    (tmp_path / "link.png").symlink_to("real.png")
    result = subprocess.run([*program, "--json", "/dev/stdout"], capture_output=True, text=True, timeout=300)
    assert '"actor/entropy": {' in result.stdout, result.stderr
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_file_is_one_sentence(tmp_path, refused):
    assert "a file is missing: path=" in refused("plot", tmp_path / "none", "--out", tmp_path / "x.png")
    assert "a directory was given for a file: path=" in refused("plot", tmp_path, "--out", tmp_path / "x.png")


def arm(folder, name, rewards, kl=0.001):
    rows = [(i, {"critic/score/mean": value, "rollout_corr/k3_kl": kl}) for i, value in enumerate(rewards, start=1)]
    return write(folder / f"{name}.jsonl", rows)


def test_the_table_of_arms_has_a_line_for_each():
    one, two = {1: {"r": {1: 0.25}}}, {1: {"r": {1: 0.1}}, 2: {"r": {1: 0.2}}}
    lines = arm_table({"bf16": summarize(one, ["r"]), "int8": summarize(two, ["r"])}, ["r"])
    assert lines[2] == "| bf16 | 1 | 1 | 0.25 +- 0, 0.25 +- 0 |"
    assert lines[3] == "| int8 | 2 | 1 | 0.15 +- 0.071, 0.15 +- 0.071 |"
    assert lines[0] == "| arm | seeds | steps | r: mean of the first 1 steps, of the last 1 |"


def test_the_table_of_arms_says_how_many_steps_a_mean_is_of():
    two, many = ({1: {"r": dict.fromkeys(range(count), 0.5)}} for count in (2, 9))
    head = arm_table({"bf16": summarize(two, ["r"]), "int8": summarize(many, ["r"])}, ["r"])[0]
    assert head.endswith("| r: mean of the first 2 to 5 steps, of the last 2 to 5 |")


def test_several_arms_and_seeds(tmp_path, capsys):
    files = [arm(tmp_path, f"{name}-seed{seed}", [0.1 * seed] * 7) for name in ("bf16", "int8") for seed in (1, 2)]
    out, numbers = tmp_path / "new" / "arms.png", tmp_path / "arms.json"
    assert main(["plot", *map(str, files), "--out", str(out), "--json", str(numbers), "--baseline", "bf16"]) == 0
    assert out.stat().st_size > 10_000
    assert json.loads(numbers.read_text())["int8"]["critic/score/mean"]["last"] == pytest.approx([0.15, 0.05 * 2**0.5])
    line = "| int8 | 2 | 7 | 0.15 +- 0.071, 0.15 +- 0.071, 0 +- 0 minus the baseline | 0.001 +- 0, 0.001 +- 0,"
    assert line in capsys.readouterr().out


def test_the_time_of_a_step_and_intervals_of_validation(tmp_path, capsys, refused):
    timed = {"critic/score/mean": 0.5, "timing_s/step": 10.0, "timing_s/gen": 6.0}
    tested = {"val-core/math_dapo/acc/mean@4": 0.25, "timing_s/testing": 3.0}
    path = write(tmp_path / "m.jsonl", [(step, timed | (tested if step == 2 else {})) for step in (1, 2, 3)])
    assert main(["plot", str(path), "--out", str(tmp_path / "m.svg")]) == 0
    printed = capsys.readouterr().out
    assert "medians, of 10.00 s a step: gen 6.00 s, other 4.00 s, validation 3.00 s" in printed
    assert "the validation curve has intervals with --questions" in printed
    assert main(["plot", str(path), "--out", str(tmp_path / "m.svg"), "--questions", "100"]) == 0
    assert "intervals" not in capsys.readouterr().out
    for questions in ("0", "-3"):
        assert f"too small: --questions={questions}. 1 or more is accepted." in refused(
            "plot", path, "--out", tmp_path / "m.svg", "--questions", questions
        )
