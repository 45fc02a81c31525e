"""The layer that is timed, on a CPU: its parts and its adapter."""

import bench_layer as bench
import pytest
import torch

TINY = bench.rollout_arms.Shape(hidden=128, intermediate=192, layers=1, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def without_a_kernel(monkeypatch):
    monkeypatch.setattr(bench, "make_plan", lambda N, K, gpu, tile: "")


def test_linears_are_those_of_the_model():
    parts = bench.parts(bench.rollout_arms.SHAPES["7B"])
    assert {name: (K, sum(members)) for name, (K, members) in parts.items()} == {
        "qkv": (3584, 4608),
        "o": (3584, 3584),
        "gate_up": (3584, 37888),
        "down": (18944, 3584),
    }


def test_a_layer_has_the_adapter_when_it_is_asked_for():
    layers = [bench.make_layer(TINY, "", "cpu") for _ in range(2)]
    inputs = bench.make_inputs(TINY, 3, 0, "cpu")
    plain, adapted = (bench.run_layers(TINY, layers, adapted, inputs) for adapted in (False, True))
    assert plain.shape == adapted.shape == (3, 128)
    assert plain.isfinite().all()
    assert (plain != adapted).any()
    inputs["slots"][:] = -1  # no token has it
    assert torch.equal(plain, bench.run_layers(TINY, layers, True, inputs))


def test_attention_takes_the_place_of_the_rotated_q(monkeypatch):
    given = []
    monkeypatch.setattr(bench, "decode_attention", lambda *args: (given.append(args), args[-1].fill_(0.5)))
    layers = [bench.make_layer(TINY, "", "cpu") | bench.make_cache(TINY, 3, 33, "cpu") for _ in range(2)]
    inputs = bench.make_inputs(TINY, 3, 33, "cpu")
    bench.run_layers(TINY, layers, False, inputs)
    assert [cache is layer["cache"] for (_, _, _, cache, *_), layer in zip(given, layers, strict=True)] == [True, True]
    for q, k, v, cache, lengths, pages, places, scale, out in given:
        assert (q.shape, k.shape, v.shape, out.shape) == ((3, 2, 64), (3, 1, 64), (3, 1, 64), (3, 2, 64))
        assert (lengths.tolist(), scale) == ([33] * 3, 0.125)
        assert sorted(pages.flatten().tolist()) == list(range(len(cache)))
        assert (places == pages[:, 2] * bench.PAGE).all()  # the first of the third page


def test_every_batch_is_timed_with_an_adapter_and_without(monkeypatch):
    adapted = []

    def note(shape, layers, it, inputs):
        adapted.append((it, len(inputs["x"]), "cache" in layers[0]))

    monkeypatch.setattr(bench, "LAYERS", 2)
    monkeypatch.setattr(bench, "run_layers", note)
    monkeypatch.setitem(bench.rollout_arms.SHAPES, "7B", TINY)
    rows = list(bench.measure(["7B"], [1, 5], [0, 40], lambda calls: (calls[0](), [8e-6, 16e-6, 8e-5])[1], "", "cpu"))
    expected = [(context, batch, arm) for context in (0, 40) for batch in (1, 5) for arm in bench.ARMS]
    assert [(row["context"], row["rows"], row["arm"]) for row in rows] == expected
    assert adapted == [(bench.ARMS[arm], batch, context > 0) for context, batch, arm in expected]
    assert {row["us"] for row in rows} == {8.0}
