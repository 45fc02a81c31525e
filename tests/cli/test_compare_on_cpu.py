import json

import pytest

from verl_qerl.cli import main
from verl_qerl.cli.compare import add_differences, by_arm, scale_of, summarize, table


def write(folder, name, rewards, kl=0.001):
    path = folder / f"{name}.jsonl"
    rows = [
        {"step": i, "data": {"critic/score/mean": value, "rollout_corr/k3_kl": kl, "other": 1.0}}
        for i, value in enumerate(rewards, start=1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_arms_are_told_from_seeds(tmp_path):
    paths = [tmp_path / f"{name}.jsonl" for name in ("int8-acr-seed1", "bf16-seed10", "int8-acr-seed2")]
    assert by_arm(paths) == {"int8-acr": {1: paths[0], 2: paths[2]}, "bf16": {10: paths[1]}}


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(["metrics"], r"no arm and no seed in a name: metrics=.*metrics\.jsonl\. ARM-seedN\.jsonl is accepted"),
     (["a-seed1", "b/a-seed01"], r"a run comes twice: metrics=.*a-seed1\.jsonl and .*a-seed01\.jsonl\. One file")],
    ids=["name", "twice"],
)  # fmt: skip
def test_bad_names_are_refused(names, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        by_arm([tmp_path / f"{name}.jsonl" for name in names])


def test_means_and_deviations_by_hand():
    # The third step is missing of one seed and left out of both.
    seeds = {1: {"r": {1: 1.0, 2: 3.0, 3: 9.0}}, 2: {"r": {1: 3.0, 2: 7.0}}}
    found = summarize(seeds)
    assert (found["seeds"], found["steps"]) == ([1, 2], [1, 2])
    assert found["r"]["mean"] == [2.0, 5.0]
    assert found["r"]["sd"] == pytest.approx([2**0.5, 8**0.5])
    # Fewer than five steps: the mean of both is first and last, 2 and 5.
    assert found["r"]["first"] == found["r"]["last"] == pytest.approx([3.5, 4.5**0.5])
    assert summarize({1: seeds[1]})["r"]["sd"] == [0.0] * 3
    ten = summarize({1: {"r": {i: float(i) for i in range(10)}}})["r"]
    assert (ten["first"], ten["last"]) == ([2.0, 0.0], [7.0, 0.0])


def test_the_table_has_a_line_for_each_arm():
    summary = {"bf16": summarize({1: {"r": {1: 0.25}}}), "int8": summarize({1: {"r": {1: 0.1}}, 2: {"r": {1: 0.2}}})}
    lines = table(summary, ["r"])
    assert lines[2] == "| bf16 | 1 | 1 | 0.25 +- 0, 0.25 +- 0 |"
    assert lines[3] == "| int8 | 2 | 1 | 0.15 +- 0.071, 0.15 +- 0.071 |"


def test_curves_that_are_far_apart_are_on_a_logarithmic_scale():
    assert scale_of([[3e-4, 2e-4], [7e-3]]) == "log"
    assert scale_of([[0.02, 0.1], [0.4]]) == "linear"
    assert scale_of([[0.0, 0.1]]) == scale_of([[-1.0, 0.1]]) == "linear"


def test_the_command_prints_and_writes(tmp_path, capsys):
    files = [write(tmp_path, f"{arm}-seed{seed}", [0.1 * seed] * 7) for arm in ("bf16", "int8") for seed in (1, 2)]
    out, numbers = tmp_path / "new" / "arms.png", tmp_path / "arms.json"
    assert main(["compare", *map(str, files), "--out", str(out), "--json", str(numbers)]) == 0
    assert out.stat().st_size > 10_000
    assert json.loads(numbers.read_text())["int8"]["critic/score/mean"]["last"] == pytest.approx([0.15, 0.05 * 2**0.5])
    assert "| int8 | 2 | 7 | 0.15 +- 0.071, 0.15 +- 0.071 | 0.001 +- 0, 0.001 +- 0 |" in capsys.readouterr().out


def test_a_metric_that_a_run_lacks_is_named(tmp_path, capsys):
    path = write(tmp_path, "bf16-seed1", [0.5])
    with pytest.raises(SystemExit):
        main(["compare", str(path), "--out", str(tmp_path / "a.png"), "--keys", "nothing"])
    assert "metrics are missing: keys=['nothing']" in capsys.readouterr().err


def test_a_name_of_no_picture_is_refused(tmp_path, capsys):
    path = write(tmp_path, "bf16-seed1", [0.5])
    with pytest.raises(SystemExit):
        main(["compare", str(path), "--out", str(tmp_path / "a")])
    assert f"no picture: out={tmp_path / 'a'}." in capsys.readouterr().err


def test_runs_without_a_common_step_are_named(tmp_path, capsys):
    files = [write(tmp_path, "bf16-seed1", [0.5]), tmp_path / "bf16-seed2.jsonl"]
    files[1].write_text(files[0].read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(SystemExit):
        main(["compare", *map(str, files), "--out", str(tmp_path / "a.png")])
    assert "the runs of an arm have no step in common: arm=bf16, seeds=[1, 2]." in capsys.readouterr().err


def test_differences_are_those_of_the_same_seed_over_common_steps():
    base = {1: {"r": {1: 1.0, 2: 2.0, 3: 50.0}}, 2: {"r": {1: 5.0, 2: 6.0}}, 3: {"r": {1: 0.0, 2: 0.0}}}
    arm = {1: {"r": {1: 2.0, 2: 3.0}}, 2: {"r": {1: 7.0, 2: 10.0}}}
    summary = {"bf16": summarize(base), "int8": summarize(arm)}
    add_differences(summary, {"bf16": base, "int8": arm}, "bf16")
    assert summary["int8"]["r"]["minus_baseline"] == pytest.approx([2.0, 2**0.5])  # 1 and 3
    assert "minus_baseline" not in summary["bf16"]["r"]
    assert table(summary, ["r"])[3].endswith(", 2 +- 1.4 minus the baseline |")


@pytest.mark.parametrize(
    ("baseline", "sentence"),
    [("fp8", r"no run of the arm: baseline=fp8\. One of \['bf16', 'int8'\] is accepted"),
     ("bf16", r"nothing to subtract: arm int8 has no seed and step in common with baseline=bf16\.")],
    ids=["unknown", "other-seeds"],
)  # fmt: skip
def test_a_baseline_that_cannot_be_subtracted_is_refused(baseline, sentence):
    arms = {"bf16": {1: {"r": {1: 1.0}}}, "int8": {2: {"r": {1: 1.0}}}}
    with pytest.raises(ValueError, match=sentence):
        add_differences({name: summarize(arm) for name, arm in arms.items()}, arms, baseline)


def test_the_command_subtracts_the_baseline(tmp_path, capsys):
    files = [write(tmp_path, f"{arm}-seed1", [reward] * 7) for arm, reward in (("bf16", 0.25), ("int8", 0.5))]
    assert main(["compare", *map(str, files), "--out", str(tmp_path / "a.png"), "--baseline", "bf16"]) == 0
    assert "0.25 +- 0 minus the baseline" in capsys.readouterr().out
