"""Launches that are chosen in a layer, on a CPU: the fastest for all models that have a linear, and no other entry."""

from types import SimpleNamespace

import pytest
import tune_layer as bench

from verl_qerl.kernels.rollout.w4a16_launch import EACH, STREAM_K, TOKENS, Launch
from verl_qerl.vllm_plugin.weights import plans

SLOW, FAST, NOISE = Launch(2, 1, 1, 2), Launch(2, 2, 1, 1), Launch(2, 1, 2, 2)
AT = TOKENS.index(32)


@pytest.fixture
def layers(monkeypatch):
    """Two models share the linear "a", of which FAST takes a tenth less; NOISE takes a thousandth less for "b"."""
    monkeypatch.setattr(plans, "PLANS", {key: plans.Plan((SLOW,) * len(TOKENS), 2) for key in "ab"})
    monkeypatch.setattr(bench, "fusing", lambda N, K, tokens: [SLOW, FAST, NOISE])
    prepared = []
    monkeypatch.setattr(bench.w4a16_matmul, "prepare", lambda launches: prepared.extend(launches))
    times = {("a", FAST): 0.9, ("b", NOISE): 0.999, ("b", FAST): 2.0}

    def microseconds(models, rows):
        key = "a" if len(models) == 2 else "b"
        return rows * times.get((key, plans.PLANS[key].launches[AT]), 1.0)

    linears = {"a": ((256, 128), ["7B", "14B"]), "b": ((128, 128), ["7B"])}
    return SimpleNamespace(linears=lambda: linears, microseconds=microseconds, prepared=prepared)


def test_the_fastest_is_kept_and_noise_is_none(layers):
    assert list(bench.choose(layers, 32)) == [("a", FAST, 32.0, 28.8), ("b", SLOW, 32.0, 32.0)]
    for key, chosen in (("a", FAST), ("b", SLOW)):
        expected = [SLOW] * len(TOKENS)
        expected[AT] = chosen
        assert list(plans.PLANS[key].launches) == expected
    own = [(32, launch._replace(intermediate=EACH)) for launch in (SLOW, FAST, NOISE)]
    others = [own[0], (32, FAST), own[1], (32, NOISE), own[2]]  # the present one is compiled
    assert layers.prepared == others * 2


def test_both_ways_are_tried_where_they_can_be(monkeypatch):
    stream, own = Launch(2, 3, STREAM_K, 1), FAST._replace(intermediate=EACH)
    monkeypatch.setattr(bench, "fusing", lambda N, K, tokens: [stream, FAST, NOISE])
    assert bench.candidates(256, 128, 64, stream, 2) == [FAST, own]
    assert bench.candidates(256, 128, 64, own, 1) == [FAST, stream]
    assert bench.candidates(256, 128, 96, stream, 2) == [FAST]


def test_linears_of_all_models_are_timed(monkeypatch):
    def without_a_kernel(N, K, gpu):
        monkeypatch.setitem(plans.PLANS, f"{N}x{K}", plans.Plan((), decode_rows=0))
        return f"{N}x{K}"

    asked = []
    monkeypatch.setattr(bench.bench_layer, "make_plan", without_a_kernel)
    monkeypatch.setattr(bench.bench_layer, "LAYERS", 2)
    tiny = {name: bench.rollout_arms.Shape(128, size, 1, 2, 1) for name, size in (("7B", 192), ("14B", 256))}
    monkeypatch.setattr(bench.rollout_arms, "SHAPES", tiny)
    timer = lambda calls: (asked.append(calls[0]().shape), [1e-6, 4e-6, 9e-6])[1]  # noqa: E731
    layers = bench.Layers(["7B", "14B"], "", "cpu", timer)
    linears = layers.linears()
    assert linears["384x128"] == ((384, 128), ["7B"])  # gate and up
    assert linears["256x128"] == ((256, 128), ["7B", "14B"])  # q, k and v
    assert next(iter(linears)) == "512x128"  # gate and up of the larger one
    assert bench.Layers(["7B"], "", "cpu", timer, ["down"]).linears() == {"128x192": ((128, 192), ["7B"])}
    assert layers.microseconds(["7B", "14B"], 5) == pytest.approx(2 * 4.0 / 2)
    assert asked == [(5, 128)] * 2


def test_the_table_keeps_what_was_not_chosen():
    first = {"N": 2, "K": 4, "decode_rows": 7, "launches": {"8": [1], "16": [2]}}
    table = {"gpu": "x", "rows": [first, {"N": 3, "K": 4, "launches": {"8": [5]}}]}
    made = bench.updated(table, {"2x4": {"16": FAST}}, "NVIDIA H200")
    assert made["rows"] == [
        {"N": 2, "K": 4, "decode_rows": 7, "launches": {"8": [1], "16": [*FAST]}},
        {"N": 3, "K": 4, "launches": {"8": [5]}},
    ]
    assert made["gpu"] == "NVIDIA H200"
    assert "tune_layer.py" in made["note"]
    assert "are those of x." in made["note"]
    assert "those of" not in bench.updated(table, {}, "x")["note"]


def test_a_gpu_without_a_table_starts_from_that_of_an_h200():
    shipped = plans.shipped_path("NVIDIA H200")
    assert bench.first_table("NVIDIA H200") == bench.first_table("NVIDIA of 2030") == shipped
    assert shipped.exists()
