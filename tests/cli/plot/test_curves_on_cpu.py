import json
import math

import pytest

from verl_qerl.cli.plot.curves import (
    add_differences,
    by_arm,
    first_and_last,
    moving_average,
    phases,
    read_metrics,
    summarize,
)


def test_arms_are_told_from_seeds(tmp_path):
    paths = [tmp_path / f"{name}.jsonl" for name in ("int8-acr-seed1", "bf16-seed10", "int8-acr-seed2")]
    assert by_arm(paths) == {"int8-acr": {1: paths[0], 2: paths[2]}, "bf16": {10: paths[1]}}


def test_a_name_without_a_seed_is_an_arm_of_one_run(tmp_path):
    assert by_arm([tmp_path / "metrics.jsonl", tmp_path / "a-seed1.jsonl"]) == {
        "metrics": {0: tmp_path / "metrics.jsonl"},
        "a": {1: tmp_path / "a-seed1.jsonl"},
    }


@pytest.mark.parametrize("names", [("a-seed1", "b/a-seed01"), ("metrics", "b/metrics")])
def test_a_run_that_comes_twice_is_refused(names, tmp_path):
    first, second = (rf".*{name}\.jsonl" for name in names)
    with pytest.raises(ValueError, match=rf"a run comes twice: metrics={first} and {second}\. One file"):
        by_arm([tmp_path / f"{name}.jsonl" for name in names])


@pytest.mark.parametrize(("step", "value"), [(2, 10**400), (10**400, 2)], ids=["value", "step"])
def test_a_number_that_no_float_can_hold_is_refused(tmp_path, step, value):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "data": {"reward": 10**300}}, {"step": step, "data": {"reward": value}}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"^a number is too large: reward at step \d+ of metrics=\S+\.jsonl\. "):
        read_metrics(path)


def test_values_that_are_not_finite_are_left_out_and_told(tmp_path, capsys):
    rows = [
        (1, {"a": 1.0, "b": math.nan}),
        (2, {"a": math.inf}),
        (3, {"a": 3.0}),
        (3, {"a": -math.inf}),
        (4, {"a": 4.0}),
    ]
    path = write(tmp_path / "m", rows)
    assert read_metrics(path) == {"a": {1: 1.0, 4: 4.0}}
    told = [
        f"left out of metrics={path}: {count} values of {key} that are not finite"
        for count, key in ((2, "a"), (1, "b"))
    ]
    assert capsys.readouterr().out.splitlines() == told


def test_a_last_line_that_is_cut_short_is_left_out_and_told(tmp_path, capsys):
    path = write(tmp_path / "m", [(1, {"a": 1.0})])
    path.write_text(path.read_text() + '{"step": 2, "data": {"a": 4')
    assert read_metrics(path) == {"a": {1: 1.0}}
    assert capsys.readouterr().out == f"left out of {path}: its last line, which is cut short\n"
    path.write_text(path.read_text() + "\n")  # nothing adds to it any more
    with pytest.raises(ValueError, match=r"^line 2 is not JSON: path="):
        read_metrics(path)


def test_means_and_deviations_by_hand():
    # The third step is missing of one seed and left out of both.
    seeds = {1: {"r": {1: 1.0, 2: 3.0, 3: 9.0}}, 2: {"r": {1: 3.0, 2: 7.0}}}
    found = summarize(seeds, ["r"])
    assert (found["seeds"], found["r"]["steps"]) == ([1, 2], [1, 2])
    assert found["r"]["mean"] == [2.0, 5.0]
    assert found["r"]["sd"] == pytest.approx([2**0.5, 8**0.5])
    # Fewer than five steps: the mean of both is first and last, 2 and 5.
    assert found["r"]["first"] == found["r"]["last"] == pytest.approx([3.5, 4.5**0.5])
    assert summarize({1: seeds[1]}, ["r"])["r"]["sd"] == [0.0] * 3
    ten = summarize({1: {"r": {i: float(i) for i in range(10)}}}, ["r"])["r"]
    assert (ten["first"], ten["last"]) == ([2.0, 0.0], [7.0, 0.0])


def test_differences_are_those_of_the_same_seed_over_common_steps():
    base = {1: {"r": {1: 1.0, 2: 2.0, 3: 50.0}}, 2: {"r": {1: 5.0, 2: 6.0}}, 3: {"r": {1: 0.0, 2: 0.0}}}
    arm = {1: {"r": {1: 2.0, 2: 3.0}}, 2: {"r": {1: 7.0, 2: 10.0}}}
    summary = {"bf16": summarize(base, ["r"]), "int8": summarize(arm, ["r"])}
    add_differences(summary, {"bf16": base, "int8": arm}, ["r"], "bf16")
    assert summary["int8"]["r"]["minus_baseline"] == pytest.approx([2.0, 2**0.5])  # 1 and 3
    assert "minus_baseline" not in summary["bf16"]["r"]


@pytest.mark.parametrize(
    ("baseline", "sentence"),
    [("fp8", r"no run of the arm: baseline=fp8\. One of \['bf16', 'int8'\] is accepted"),
     ("bf16", r"nothing to subtract: arm int8 has no seed and step in common with baseline=bf16\.")],
    ids=["unknown", "other-seeds"],
)  # fmt: skip
def test_a_baseline_that_cannot_be_subtracted_is_refused(baseline, sentence):
    arms = {"bf16": {1: {"r": {1: 1.0}}}, "int8": {2: {"r": {1: 1.0}}}}
    with pytest.raises(ValueError, match=sentence):
        add_differences({name: summarize(arm, ["r"]) for name, arm in arms.items()}, arms, ["r"], baseline)


def test_each_metric_has_its_own_steps():
    seeds = {1: {"r": {1: 0.0, 2: 0.0, 3: 0.0}, "val": {2: 0.5}}, 2: {"r": {1: 1.0, 2: 1.0}, "val": {2: 0.7, 4: 1.0}}}
    found = summarize(seeds, ["r", "val"])
    assert (found["r"]["steps"], found["val"]["steps"], found["val"]["mean"]) == ([1, 2], [2], [0.6])
    with pytest.raises(ValueError, match=r"the runs of an arm have no step in common: val of seeds=\[1, 2\]"):
        summarize({1: seeds[1], 2: {"r": {1: 1.0}, "val": {4: 1.0}}}, ["r", "val"])


def test_phases_and_what_is_left_of_a_step():
    run = {
        "timing_s/step": {1: 10.0, 2: 12.0},
        "timing_s/gen": {1: 4.0, 2: 5.0},
        "timing_s/update_actor": {1: 3.0},
        "timing_s/testing": {2: 30.0},
        "timing_s/generate_sequences/max": {1: 3.5, 2: 4.5},
    }
    assert phases(run) == {
        "gen": {1: 4.0, 2: 5.0},
        "update_actor": {1: 3.0, 2: 0.0},
        "other": {1: 3.0, 2: 7.0},
        "validation": {1: 0.0, 2: 30.0},
    }
    assert phases({"timing_s/step": {1: 10.0}}) == phases({"timing_s/gen": {1: 4.0}}) == {}


def write(path, rows):
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows))
    return path


def test_a_step_logged_twice_is_merged_and_the_later_value_wins(tmp_path):
    path = write(tmp_path / "m", [(1, {"a": 1.0, "b": 2.0, "c": "text"}), (1, {"a": 3.0}), (2, {"a": 4.0})])
    assert read_metrics(path) == {"a": {1: 3.0, 2: 4.0}, "b": {1: 2.0}}


@pytest.mark.parametrize("line", ['{"step": 1, "data": 5}', '{"step": "x", "data": {}}', '{"step": null, "data": {}}'])
def test_a_line_of_another_kind_is_named(tmp_path, line):
    (tmp_path / "m").write_text(line)
    with pytest.raises(ValueError, match=r"line 1 of \S+m cannot be used: (data|step)="):
        read_metrics(tmp_path / "m")


def test_the_moving_average_looks_back_only():
    assert moving_average([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]


def test_means_go_by_step_and_not_by_line():
    assert first_and_last({6: 0.0, 1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0, 5: 10.0}) == (10.0, 8.0)
