"""The tree of options: its defaults, and the sentence that a bad value gets."""

import math

import pytest

from verl_qerl.options.schema import Base, Gate, Qerl, Rollout


def test_absent_options_have_their_defaults():
    assert Qerl.from_mapping(None) == Qerl.from_mapping({"base": {}, "gate": None}) == Qerl()
    assert Qerl().gate == Gate(0.05, 0.25, 0)
    assert (Qerl().base.format, Qerl().base.ignore) == (None, ("lm_head",))


def test_nodes_are_read():
    found = Qerl.from_mapping({"base": {"ignore": ["a"]}, "rollout": {"lora": "stock"}, "gate": {"max_kl": None}})
    assert found == Qerl(Base(ignore=("a",)), Rollout(lora="stock"), Gate(max_kl=None))


BAD = [
    ({"kernels": {}}, r"^unknown option qerl\.kernels=\{\}\. Known options are base, rollout, gate\."),
    ({"base": {"scales": 1}}, r"^unknown option qerl\.base\.scales=1\. Known options are format, scale, "),
    (
        {"rollout": 1},
        r"^qerl\.rollout=1 is no group of options\. Accepted are options such as `\+qerl\.rollout\.linear=",
    ),
    (1, r"^qerl=1 is no group of options"),
    (
        {"rollout": {"lora": "Single"}},
        r"^qerl\.rollout\.lora='Single' is no value of this option\. Accepted: single, stock\.",
    ),
    ({"rollout": {"linear": ["auto"]}}, r"^qerl\.rollout\.linear=\['auto'\] is no value"),
    (
        {"rollout": {"attention": 0}},
        r"^qerl\.rollout\.attention=0 is no value .* Accepted: auto, stock\.",
    ),
    ({"base": {"format": ["nvfp4"]}}, r"^qerl\.base\.format=\['nvfp4'\] is no value .* Accepted: fp8, "),
    ({"base": {"format": "int4"}}, r"^qerl\.base\.format='int4' is no value .* Accepted: fp8, int8, mxfp4, nvfp4\."),
    ({"base": {"format": "int8", "scale": "mse"}}, r"scale='mse' .* Accepted: minmax, with \+rollout=int8\."),
    ({"base": {"scale": "absmax"}}, r"^qerl\.base\.scale='absmax' is no value .* Accepted: mse, minmax"),
    *(
        ({"base": {"ignore": value}}, r"^qerl\.base\.ignore=.* is no value .* Accepted: a list of exact names")
        for value in ("lm_head", None, [1])
    ),
    *(
        ({"gate": {"mismatch_sample": value}}, r"^qerl\.gate\.mismatch_sample=.* is no value .* a number of sequences")
        for value in (0.5, -1)
    ),
    ({"rollout": {"sampler": "fast"}}, r"^qerl\.rollout\.sampler='fast' is no value .* Accepted: auto, stock\."),
    *(
        ({"gate": {name: value}}, rf"^qerl\.gate\.{name}=.* Accepted: a number above 0, or null for no limit")
        for name in ("max_initial_kl", "max_kl")
        for value in (0, -0.1, math.nan, math.inf, True, "0.1", [1])
    ),
]


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=lambda value: str(value)[:50])
def test_bad_values_get_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Qerl.from_mapping(options)
