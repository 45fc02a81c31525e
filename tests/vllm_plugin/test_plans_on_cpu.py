"""Tables of measured crossings, and the reasons against a choice by rows."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from verl_qerl.cli.tune import MODELS
from verl_qerl.kernels import medium_batch
from verl_qerl.kernels.small_batch import LAUNCHES, MAX_ROWS
from verl_qerl.vllm_plugin import plans


def test_a_machine_without_a_gpu_is_told_so():
    assert plans.why_not() == "there is no GPU"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plans._tuned.cache_clear()
    yield tmp_path / "verl_qerl"
    plans._tuned.cache_clear()


def test_the_table_that_ships_has_the_shapes_of_a_7b(tables):
    rows = {(row["N"], row["K"]): row for row in plans._tuned("NVIDIA H200")}
    for shape in MODELS["qwen2.5-7b"]:
        assert plans.nearest(*shape, "NVIDIA H200") == rows[shape]
        assert {tuple(launch) for launch in rows[shape]["launches"]} <= set(LAUNCHES)
        assert rows[shape]["small_rows"] <= MAX_ROWS
        assert rows[shape]["medium_rows"] <= medium_batch.MAX_ROWS
        for tokens, (pieces, groups, split, blocks) in rows[shape]["medium_launches"].items():
            assert (pieces, groups, blocks) in medium_batch.SHAPES[int(tokens)]
            assert 1 <= split <= 8


@pytest.fixture
def no_humming(monkeypatch):
    monkeypatch.setattr(plans, "_humming_configs", lambda N, K: ("layer", "tuning"))
    monkeypatch.setattr(plans, "PLANS", {})


def test_a_plan_takes_measured_launches_and_guesses_the_others(tables, no_humming):
    row = plans.nearest(4608, 3584, "NVIDIA H200")
    plan = plans.PLANS[plans.make_plan(4608, 3584, "NVIDIA H200")]
    assert plan.medium_launch(33) == plan.medium_launch(64) == tuple(row["medium_launches"]["64"])
    assert "96" not in row["medium_launches"]
    assert plan.medium_launch(65) == medium_batch.guess_launch(4608, 3584, 96)
    other = plans.PLANS[plans.make_plan(7168, 5120, "NVIDIA H200")]
    assert other.medium_launch(64) == medium_batch.guess_launch(7168, 5120, 64)
    assert (other.small_rows, other.medium_rows) == (16, 0)


def test_subnormal_scales_go_to_humming(tables, no_humming):
    plan = plans.PLANS[plans.make_plan(4608, 3584, "NVIDIA H200", normal_scales=False)]
    assert (plan.small_rows, plan.medium_rows) == (0, 0)


def test_a_table_of_the_user_goes_first(tables):
    path = plans.table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    rows = [
        {"N": 64, "K": 64, "packed_rows": 3, "decode_rows": 7},
        {"N": 9999, "K": 64, "packed_rows": 1, "decode_rows": 2},
    ]
    path.write_text(json.dumps({"rows": rows}))
    assert path == tables / "nvidia_h200.json"
    assert plans.nearest(64, 64, "NVIDIA H200") == rows[0]
    assert plans.nearest(128, 64, "NVIDIA H200") == rows[0]


def test_an_unknown_gpu_uses_the_table_of_an_h200_and_says_so(tables, caplog):
    plans.say_once.cache_clear()
    assert plans.nearest(3584, 3584, "NVIDIA H100") == plans.nearest(3584, 3584, "NVIDIA H200")
    plans.nearest(3584, 3584, "NVIDIA H100")
    assert [record.message for record in caplog.records].count(
        "verl_qerl: there is no table of kernels for 'NVIDIA H100'; the one of an H200 is used."
    ) == 1


def test_tables_are_packaged():
    assert list((Path(plans.__file__).parent / "tuned").glob("*.json"))
