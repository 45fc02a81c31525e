"""What the benchmark makes of samples and metrics; the rest of it is a verl run on a GPU."""

import bench_train_step as bench
import pytest


def test_the_largest_reading_of_each_second():
    samples = [(10.0, 1.0), (10.5, 3.0), (10.9, 2.0), (11.0, 4.0), (13.2, 5.0)]
    assert bench.by_second(samples) == [3.0, 4.0, 0.0, 5.0]
    assert bench.by_second([]) == []


def test_phases_are_laid_back_from_the_end_of_a_step():
    row = {"step": 1, "data": {"timing_s/step": 10.0, "timing_s/gen": 4.0, "timing_s/update_actor": 5.0}}
    found = bench.lay_out(row, 100.0, [(92.0, 7.0), (94.9, 8.0), (96.0, 3.0), (99.0, 2.0)])
    assert found["phases"] == {
        "gen": {"seconds": 4.0, "peak_gib": 8.0},
        "update_actor": {"seconds": 5.0, "peak_gib": 3.0},
    }


def test_without_a_cap_nothing_is_taken():
    assert bench.take_ballast(None) == []


def test_only_visible_gpus_are_read():
    assert bench.visible_gpus(2, None) == [0, 1]
    assert bench.visible_gpus(2, "1") == [1]
    assert bench.visible_gpus(4, "3, 0") == [3, 0]
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES='2'\. Accepted are numbers below 2"):
        bench.visible_gpus(2, "2")
    with pytest.raises(ValueError, match="not GPUs of this machine"):
        bench.visible_gpus(2, "GPU-0123")
