"""The arithmetic of UAQ on tensors and names; tests/verl_plugin/actor/test_uaq_engine_on_cpu.py has models."""

import json

import pytest
import torch

from verl_qerl.algos.uaq import (
    RECORD,
    UAQConfig,
    fold_,
    is_power_of_two,
    norm_scale,
    read_record,
    scaled_parameters,
    unfold_,
    write_record,
)
from verl_qerl.errors import CheckpointFormatError

NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
READERS = [f"self_attn.{name}_proj.weight" for name in "qkv"] + ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
OTHERS = ["self_attn.o_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.bias", "self_attn.q_norm.weight"]


def names(layers=2, without=(), extra=()):
    held = [name for name in (*NORMS, *READERS, *OTHERS, *extra) if name not in without]
    inside = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in held]
    return ["model.embed_tokens.weight", *inside, "model.norm.weight", "lm_head.weight"]


def all_bf16() -> torch.Tensor:
    """Every finite bf16 number but those so small that their third leaves the normal range of float32."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite() & (values.abs() > 1e-30) & (values.abs() < 1e30)]


def test_norms_and_what_reads_them_are_scaled_and_nothing_else():
    roles = scaled_parameters(names())
    expected = {f"model.layers.{layer}.{name}" for layer in range(2) for name in (*NORMS, *READERS)}
    assert roles.keys() == expected
    assert {name for name, role in roles.items() if role == "norm"} == {name for name in roles if "layernorm" in name}


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (names(without=["input_layernorm.weight"]), "model.layers.0 has no 'input_layernorm.weight'"),
        (names(extra=["pre_feedforward_layernorm.weight"]), "has a 'pre_feedforward_layernorm.weight'"),  # Gemma 2
        (names(extra=["input_layernorm.bias"]), "has a 'input_layernorm.bias'"),  # a LayerNorm
        (names(extra=["mlp.experts.0.up_proj.weight"]), "has a 'mlp.experts.0.up_proj.weight'"),
        (names(without=READERS[:3], extra=["self_attn.qkv_proj.weight"]), "has a 'self_attn.qkv_proj.weight'"),
        (["transformer.h.0.ln_1.weight"], "the model has no decoder layers"),
    ],
    ids=["no-norm", "another-norm", "bias", "experts", "fused", "no-layers"],
)
def test_other_layers_are_refused(held, told):
    with pytest.raises(ValueError, match=r"Leave out `\+uaq\.enabled=true`") as caught:
        scaled_parameters(held)
    assert told in str(caught.value)


@pytest.mark.parametrize("scale", [1.5, 2.0, 1.7, 3.0])
def test_every_bf16_number_scaled_in_float32_comes_back(scale):
    values = all_bf16()
    assert len(values) > 45_000
    for role in ("norm", "linear"):
        there = fold_(role, values.float(), scale)
        assert not torch.equal(there, values.float())
        assert torch.equal(unfold_(role, there, scale).bfloat16(), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_powers_of_two_are_exact_in_every_dtype(dtype):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for role in ("norm", "linear"):
        assert torch.equal(unfold_(role, fold_(role, values.clone(), 4.0), 4.0), values)
    assert [scale for scale in (0.5, 1.5, 2, 3, 4, 6) if is_power_of_two(scale)] == [0.5, 2, 4]


def test_in_bf16_another_scale_cannot_be_undone():
    values = all_bf16()
    for role in ("norm", "linear"):
        assert not torch.equal(unfold_(role, fold_(role, values.clone(), 1.5), 1.5), values)


def test_the_product_is_the_same():
    generator = torch.Generator().manual_seed(0)
    weight, norm, x = (torch.randn(size, generator=generator) for size in ((48, 64), (64,), (5, 64)))
    expected = (x * norm) @ weight.T
    for scale, bound in ((2.0, 0.0), (1.5, 1e-5)):
        found = (x * fold_("norm", norm.clone(), scale)) @ fold_("linear", weight.clone(), scale).T
        assert (found - expected).abs().max() <= bound * expected.abs().max()


def test_noise_grows_with_the_norms_that_are_scaled():
    grow = [norm_scale(f"model.layers.3.{name}", 1.5) for name in ("input_layernorm", "self_attn.q_norm", "mlp")]
    assert grow == [1.5, 1.0, 1.0]
    assert norm_scale("model.norm", 1.5) == 1.0


def test_options():
    assert UAQConfig.from_mapping(None) == UAQConfig(False, 1.5)
    assert UAQConfig.from_mapping({"enabled": True, "scale": 2}) == UAQConfig(True, 2.0)
    for options, told in (
        (
            {"enabled": True, "scale": 1},
            "this option. Accepted: a number above 1 and at most 16",
        ),
        ({"enabled": True, "scale": 17}, "is no value of this option"),
        ({"enabled": True, "scale": True}, "is no value of this option"),
        ({"enabled": True, "scale": float("nan")}, "is no value of this option"),
        ({"enabled": 1}, "uaq.enabled=1 is no value of this option"),
    ):
        with pytest.raises(ValueError, match="Accepted: ") as caught:
            UAQConfig.from_mapping(options)
        assert told in str(caught.value)


def test_a_checkpoint_says_that_it_is_scaled(tmp_path):
    folder = tmp_path / "global_step_1" / "actor"
    write_record(folder, None, "model")
    assert not folder.exists()
    assert read_record(folder) is None
    write_record(folder, 1.5, "model")
    assert read_record(folder) == {"scale": 1.5, "base": "model"}
    assert [path.name for path in folder.iterdir()] == [RECORD]
    write_record(folder, None, "model")  # another run in the same place
    assert read_record(folder) is None


@pytest.mark.parametrize(
    "content", ['{"scale": 1.5', '{"scale": 0.5, "base": "m"}', '{"scale": 2}', "[]", '{"scale": 2, "base": 1}']
)
def test_a_damaged_record_is_no_unscaled_checkpoint(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(CheckpointFormatError, match="the record of UAQ cannot be read"):
        read_record(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps({"scale": 2.0, "base": "m"}))
    assert read_record(tmp_path)
