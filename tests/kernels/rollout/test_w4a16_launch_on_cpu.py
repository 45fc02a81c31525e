"""The choice of launches: which ones can run, and that the model of the time finds the ones measured to be fastest."""

import json
from pathlib import Path

import pytest

import verl_qerl
from verl_qerl.cli.tune.command import TRIED, fusing
from verl_qerl.cli.tune.shapes import MODELS
from verl_qerl.kernels.rollout import w4a16_launch
from verl_qerl.kernels.rollout.w4a16_launch import EACH, GATHERED, SHAPES, STREAM_K, TOKENS, Launch, own_rows

TUNED = Path(verl_qerl.__file__).parent / "vllm_plugin" / "weights" / "tuned"
TABLES = {path.stem: json.loads(path.read_text())["rows"] for path in sorted(TUNED.glob("*.json"))}
MEASURED = {(name, row["N"], row["K"]): row["launches"] for name, rows in TABLES.items() for row in rows}
WEIGHTS = sorted({shape for shapes in MODELS.values() for shape in shapes})


PADDED = {1: 8, 8: 8, 9: 16, 17: 32, 65: 96, 128: 128, 129: 144, 145: 192, 256: 256}
PADDED |= {257: 144, 288: 144, 289: 192, 384: 192, 512: 256}  # twice as many rows at a time


@pytest.mark.parametrize(("rows", "expected"), PADDED.items())
def test_rows_are_padded_to_what_is_compiled(rows, expected):
    assert w4a16_launch.padded_rows(rows) == expected


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("weight", [*WEIGHTS, (256, 128), (64, 64)], ids=str)
def test_a_guess_can_run_and_is_the_first_candidate(weight, tokens):
    N, K = weight
    found = w4a16_launch.launch_candidates(N, K, tokens)
    assert w4a16_launch.guess_launch(N, K, tokens) == found[0]
    assert len(set(found)) == len(found)
    for launch in found:
        rows = w4a16_launch.rows_at_a_time(tokens, launch)
        assert rows == tokens // (2 if launch.split_k != STREAM_K and tokens > 128 else 1)
        assert (launch.warp_tiles, launch.warpgroups, launch.blocks_per_sm) in SHAPES[rows]
        # A cluster, each block of which has a part of K.
        assert launch.split_k == STREAM_K or 1 <= launch.split_k <= min(8, K // 64)


def test_a_guess_for_many_rows_shares_no_k():
    assert w4a16_launch.guess_launch(768, 2304, 256).split_k != STREAM_K
    assert w4a16_launch.guess_launch(768, 2304, 257) == Launch(1, 2, STREAM_K, 1)


@pytest.mark.parametrize("measured", MEASURED, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_model_of_the_time_tries_what_was_measured_to_be_fastest(measured, tokens):
    fastest = Launch(*MEASURED[measured][str(tokens)])._replace(intermediate=GATHERED)
    assert fastest in fusing(*measured[1:], tokens)[:TRIED]


@pytest.mark.parametrize(
    ("groups", "low", "rank", "members", "per_entry", "expected"),
    [
        (1, EACH, 32, 3, 128, 32),  # a block of one member
        (2, EACH, 32, 3, 128, 64),  # of two at most
        (3, EACH, 32, 3, 128, 0),  # of three
        (3, EACH, 64, 1, 128, 64),  # of the only one
        (1, EACH, 128, 1, 128, 0),
        (1, GATHERED, 32, 1, 128, 0),
    ],
)
def test_a_block_makes_low_rank_of_the_members_that_its_columns_may_belong_to(
    groups, low, rank, members, per_entry, expected
):
    assert own_rows(Launch(2, groups, 4, 1, low), rank, members, per_entry) == expected
