"""The ways that are timed, on a CPU: they multiply by the same weight, and each batch is timed in each way."""

import pytest
import torch

from verl_qerl.testing import load_beside
from verl_qerl.vllm_plugin.weights import fp8_copy

bench = load_beside(__file__, "bench_fp8")
TINY = bench.rollout_arms.Shape(hidden=128, intermediate=192, layers=1, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    monkeypatch.setattr(bench.bench_layer, "make_plan", lambda N, K, gpu: f"{N}x{K}")
    monkeypatch.setattr(fp8_copy, "FEWEST_ROWS", fp8_copy.FEWEST_ROWS)


def test_every_way_multiplies_by_the_same_weight():
    fp8_copy.FEWEST_ROWS = 1
    made, x = bench.weights(128, (64, 128), "", "cpu"), torch.randn(3, 128).bfloat16()
    for w in made:
        w["adapter"][1].zero_()
    ours, fp8, bf16 = ([call().double() for call in calls] for calls in bench.ways(made, x).values())
    assert len(ours) == len(fp8) == len(bf16) == 2
    for one, other, dense in zip(ours, fp8, bf16, strict=True):
        assert (one - dense).norm() / dense.norm() < 0.01
        assert 0.01 < (other - dense).norm() / dense.norm() < 0.06


def test_every_linear_and_batch_is_timed(monkeypatch):
    monkeypatch.setitem(bench.rollout_arms.SHAPES, "7B", TINY)
    rows = list(
        bench.measure(["7B"], [1, 5], lambda calls: [call().norm().item() and 8e-6 for call in calls], "", "cpu")
    )
    assert [(row["linear"], row["rows"]) for row in rows] == [
        (linear, batch) for linear in ("qkv", "o", "gate_up", "down") for batch in (1, 5)
    ]
    assert all(row["us"] == {"ours": 8.0, "fp8": 8.0, "bf16": 8.0} for row in rows)
