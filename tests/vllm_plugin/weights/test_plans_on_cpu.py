"""Tables of measured crossings, and the reasons against a choice by rows."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
from verl_qerl.cli.tune.shapes import MODELS
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.w4a16_launch import (
    EACH,
    GATHERED,
    SHAPES,
    STREAM_K,
    TOKENS,
    Launch,
    can_make_intermediate,
    guess_launch,
    rows_at_a_time,
)
from verl_qerl.kernels.rollout.w4a16_matmul import can_fuse
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.weights import plans


def test_a_machine_without_a_gpu_is_told_so():
    assert plans.why_not() == "there is no GPU"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plans._tuned.cache_clear()
    yield tmp_path / "verl_qerl"
    plans._tuned.cache_clear()


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("shape", sorted({shape for shapes in MODELS.values() for shape in shapes}), ids=str)
def test_a_table_that_ships_has_the_shapes_that_tune_measures(shape, gpu, tables):
    assert json.loads(plans.shipped_path(gpu).read_text())["gpu"] == gpu
    row = plans.nearest(*shape, gpu)
    assert (row["N"], row["K"]) == shape
    assert row["decode_rows"] > 32
    assert list(row["launches"]) == [str(tokens) for tokens in TOKENS]
    for tokens, values in row["launches"].items():
        launch = Launch(*values)
        assert (launch.warp_tiles, launch.warpgroups, launch.blocks_per_sm) in SHAPES[
            rows_at_a_time(int(tokens), launch)
        ]
        assert launch.split_k == STREAM_K or 1 <= launch.split_k <= 8
        assert launch.intermediate == GATHERED or can_make_intermediate(int(tokens), launch)


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled when a plan is made."""
    found = []
    monkeypatch.setattr(plans, "PLANS", {})
    monkeypatch.setattr(plans.w4a16_matmul, "prepare", found.extend)
    return found


def test_a_plan_takes_measured_launches_and_guesses_the_others(tables, compiled):
    row = plans.nearest(4608, 3584, "NVIDIA H200")
    plan = plans.PLANS[plans.make_plan(4608, 3584, "NVIDIA H200")]
    assert plan.launch(33) == plan.launch(64) == Launch(*row["launches"]["64"])
    assert plan.decode_rows == row["decode_rows"]
    assert compiled == list(plan.kernels())
    small = plans.PLANS[plans.make_plan(256, 512, "NVIDIA H200")]
    assert small.launches == tuple(guess_launch(256, 512, tokens) for tokens in TOKENS)


def test_a_linear_of_about_the_size_of_another_is_dealt_out_like_it(tables, compiled):
    row = plans.nearest(7168, 4096, "NVIDIA H200")
    assert (row["N"], row["K"]) == (6144, 4096)
    plan = plans.PLANS[plans.make_plan(7168, 4096, "NVIDIA H200")]
    assert plan.launches == tuple(Launch(*row["launches"][str(tokens)]) for tokens in TOKENS)
    # Shared by eight, 256 columns of K leave four blocks of a cluster nothing to do.
    eight = {"N": 256, "K": 512, "launches": {"8": [2, 1, 8, 2]}}
    assert plans.choose_launch(eight, 256, 512, 8) == Launch(2, 1, 8, 2)
    assert plans.choose_launch(eight, 256, 320, 8) == guess_launch(256, 320, 8)


@pytest.mark.parametrize(
    ("slices", "K"),
    [
        ((2240, 2240), 1536),  # gate_up of 1.5B over four GPUs
        ((14784, 14784), 8192),  # of 72B over two
        ((576, 192, 192), 576),  # qkv of SmolLM2-135M
        ((576,), 1536),
        ((3584, 512, 512), 3584),
    ],
    ids=str,
)
def test_a_launch_takes_an_adapter_on_members_in_tiles_of_64(slices, K, tables, compiled):
    N, members = sum(slices), member_of_tile(slices, "cpu")
    a, b = torch.empty(32 * len(slices), K, device="meta"), torch.empty(N, 32, device="meta")
    plan = plans.PLANS[plans.make_plan(N, K, "NVIDIA H200", N // len(members))]
    assert all(can_fuse(a, b, members, launch) for _, launch in plan.kernels())
    whole = plans.PLANS[plans.make_plan(N, K, "NVIDIA H200")]  # another plan of the same shape
    assert (whole == plan) is (N // len(members) == 128)


def test_members_in_tiles_of_32_keep_the_fastest_launch(tables, compiled):
    small, whole = (plans.PLANS[plans.make_plan(1856, 1024, "NVIDIA H200", tile)] for tile in (32, 128))
    assert small == whole


def test_one_alike_is_right_more_often_than_the_guess(tables):
    table, found = plans._tuned("NVIDIA H200"), Counter()
    for (N, K), row in table.items():
        near = min(table.keys() - {(N, K)}, key=lambda shape: plans.distance(shape, (N, K)))
        if plans.distance(near, (N, K)) >= plans._ALIKE:
            continue
        for tokens in TOKENS:
            fastest = Launch(*row["launches"][str(tokens)])._replace(intermediate=GATHERED)
            alike = plans.choose_launch(table[near], N, K, tokens)._replace(intermediate=GATHERED)
            found.update(alike=alike == fastest, guess=guess_launch(N, K, tokens) == fastest, all=1)
    assert found["all"] > 300
    assert found["alike"] > 2 * found["guess"]


def test_a_launch_that_shares_k_is_for_no_more_rows_than_it_was_measured_with():
    stream, shared = Launch(1, 3, STREAM_K, 1), Launch(2, 2, 4, 1)
    plan = plans.Plan((*[Launch(2, 1, 1, 2)] * 6, stream, stream, shared), 1 << 30)
    assert plan.launch(256) == shared
    assert plan.launch(180) == plan.launch(300) == stream
    assert plan.launch(512) == Launch(1, 2, STREAM_K, 1)
    assert set(plan.kernels()) == {*zip(TOKENS, plan.launches, strict=True), (256, Launch(1, 2, STREAM_K, 1))}


def test_a_table_says_how_low_rank_is_made_or_it_is_gathered(tables, compiled):
    path = plans.table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    launches = {"32": [2, 1, 4, 2], "64": [2, 1, 4, 2, EACH]}
    row = {"N": 256, "K": 512, "launches": launches, "decode_rows": 7}
    path.write_text(json.dumps({"rows": [row]}))
    plan = plans.PLANS[plans.make_plan(256, 512, "NVIDIA H200")]
    assert plan.launch(32) == Launch(2, 1, 4, 2, GATHERED)
    assert plan.launch(64) == Launch(2, 1, 4, 2, EACH)


def write_table(gpu: str, *shapes: tuple[int, int]) -> None:
    path = plans.table_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"N": N, "K": K, "launches": {}, "decode_rows": 7} for N, K in shapes]
    path.write_text(json.dumps({"rows": rows}))


def test_a_table_of_the_user_hides_no_linear_that_it_lacks(tables):
    shipped = plans.nearest(4608, 3584, "NVIDIA H200")
    plans._tuned.cache_clear()
    write_table("NVIDIA H200", (64, 64), (3584, 3584))
    assert plans.nearest(3584, 3584, "NVIDIA H200")["decode_rows"] == 7
    assert plans.nearest(4608, 3584, "NVIDIA H200") == shipped


def test_a_linear_that_no_table_has_is_said(tables, caplog):
    say_once.cache_clear()
    for _ in range(2):
        plans.nearest(7168, 4096, "NVIDIA H200")
        plans.nearest(768, 768, "NVIDIA H200")
    plans.nearest(7168, 5120, "NVIDIA H200")
    first, remedy, second = (record.message for record in caplog.records)
    assert "no table of kernels has linears of 7168 x 4096: what is known of 6144 x 4096, and" in first
    assert "`python -m verl_qerl tune --models DIR_OF_THE_MODEL` measures what" in remedy
    assert "linears of 768 x 768" in second


def test_an_h200_stands_in_for_what_a_table_lacks(tables, caplog):
    say_once.cache_clear()
    write_table("NVIDIA GH200", (64, 64))
    assert plans.nearest(64, 64, "NVIDIA GH200")["decode_rows"] == 7
    assert not caplog.records
    assert plans.nearest(4608, 3584, "NVIDIA GH200") == plans.nearest(4608, 3584, "NVIDIA H200")
    (record,) = caplog.records
    assert (
        "the table of kernels for 'NVIDIA GH200' lacks linears of 4608 x 3584; the one of an H200 is u"
        in record.message
    )


def test_a_table_of_the_user_goes_first(tables):
    path = plans.table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    rows = [
        {"N": 64, "K": 64, "launches": {}, "decode_rows": 7},
        {"N": 9999, "K": 64, "launches": {}, "decode_rows": 2},
    ]
    path.write_text(json.dumps({"rows": rows}))
    assert path == tables / "nvidia_h200.json"
    assert plans.nearest(64, 64, "NVIDIA H200") == rows[0]
    assert plans.nearest(128, 64, "NVIDIA H200") == rows[0]


OLD = json.dumps({"rows": [{"N": 64, "K": 64, "launches": {}, "tiled_rows": 3}]})


@pytest.mark.parametrize(
    "content", [OLD, '{"rows": [{"N": 4608, "K"', "[]", '{"rows": 3}', '{"rows": [[]]}'], ids=lambda text: text[:24]
)
def test_a_table_that_is_cut_or_of_another_version_is_left_out_and_it_is_said(tables, caplog, content):
    say_once.cache_clear()
    path = plans.table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert plans.nearest(64, 64, "NVIDIA H200")["decode_rows"] >= 128
    assert (
        f"{path} is cut short or of another version and left out: run `python -m verl_qerl tune` again" in caplog.text
    )


def test_a_table_that_cannot_be_read_is_left_out_and_it_is_said(tables, caplog):
    say_once.cache_clear()
    path = plans.table_path("NVIDIA H200")
    path.mkdir(parents=True)  # no account is refused it, as another's home would be
    assert plans.nearest(64, 64, "NVIDIA H200")["decode_rows"] >= 128
    assert f"{path} cannot be read (Is a directory) and is left out." in caplog.text


def test_an_account_without_a_home_uses_the_table_that_ships(tables, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert plans.nearest(64, 64, "NVIDIA H200")["decode_rows"] >= 128


def test_an_unknown_gpu_uses_the_table_of_an_h200_and_says_so(tables, caplog):
    say_once.cache_clear()
    assert plans.nearest(3584, 3584, "NVIDIA GH200") == plans.nearest(3584, 3584, "NVIDIA H200")
    plans.nearest(3584, 3584, "NVIDIA GH200")
    assert [record.message for record in caplog.records].count(
        "verl_qerl: there is no table of kernels for 'NVIDIA GH200'; the one of an H200 is used."
    ) == 1


def test_tables_are_packaged():
    assert list((Path(plans.__file__).parent / "tuned").glob("*.json"))
