"""Which launches are compared for a linear that a table lacks."""

import pytest

from verl_qerl.kernels.rollout.w4a16_launch import EACH, GATHERED, Launch, guess_launch

pytest.importorskip("vllm")
import bench_guess as guess


def row(N: int, K: int, *launch: int) -> dict:
    return {"N": N, "K": K, "launches": {str(tokens): list(launch) for tokens in (64, 256)}}


def test_the_nearest_linear_stands_in_where_its_launch_can():
    near, far = row(4096, 4096, 2, 1, 4, 2, EACH), row(51200, 5120, 2, 2, 1, 1, GATHERED)
    found = guess.choices(row(4608, 3584, 2, 2, 8, 1), [far, near], 64)
    expected = guess_launch(4608, 3584, 64)
    assert found == {
        "measured": Launch(2, 2, 8, 1),
        "guess": expected,
        "guess_each": expected._replace(intermediate=EACH),
        "nearest": Launch(2, 1, 4, 2, EACH),
    }
    assert set(guess.choices(row(4608, 3584, 1, 3, 3, 1), [row(4096, 4096, 1, 2, 7, 1)], 256)) == {"measured", "guess"}


def test_the_summary_is_beside_the_measured_launch():
    rows = [{"N": 1, "K": 1, "tokens": 8, "us": {"measured": 2.0, "guess": us}} for us in (2.0, 3.0, 4.0)]
    rows.append({"N": 1, "K": 1, "tokens": 8, "us": {"measured": 2.0, "nearest": 2.0}})
    assert guess.summary(rows).splitlines()[2:] == ["| 8 | guess | 1.50 | 2.00 |", "| 8 | nearest | 1.00 | 1.00 |"]
