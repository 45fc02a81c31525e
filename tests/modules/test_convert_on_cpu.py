import pytest
import torch.nn as nn

from verl_qerl.modules.convert import packed_linears, replace_linears
from verl_qerl.modules.format_linear import NVFP4Linear

LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
NAMES = [
    f"model.layers.{i}.{leaf}" for i in range(2) for leaf in (*LEAVES, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]


def test_replaces_what_matches_and_nothing_else(tiny_model):
    model = tiny_model()
    replaced = replace_linears(model, lambda name: ".layers." in name)
    assert sorted(replaced) == sorted(NAMES)
    assert all(model.get_submodule(name) is linear for name, linear in replaced.items())
    assert type(model.lm_head) is nn.Linear


def test_takes_over_bias_and_device(tiny_model):
    model = tiny_model().to("meta")
    bias = model.model.layers[0].self_attn.q_proj.bias
    linear = replace_linears(model, lambda name: name.endswith("q_proj"))["model.layers.0.self_attn.q_proj"]
    assert linear.weight.is_meta
    assert linear.bias.shape == bias.shape
    assert linear.bias.dtype == bias.dtype
    assert not linear.bias.requires_grad
    assert replace_linears(model, lambda name: name.endswith("o_proj"))["model.layers.1.self_attn.o_proj"].bias is None


def test_does_not_pack_twice_nor_touch_subclasses():
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": Special(16, 16)})
    assert list(replace_linears(model, lambda name: True)) == ["a"]
    assert type(model["b"]) is Special
    with pytest.raises(ValueError, match="no linear of ModuleDict matched"):
        replace_linears(model, lambda name: True)


def test_no_match_names_the_linears_there_are(tiny_model):
    kinds = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(
        ValueError, match=rf"^no linear of Qwen2ForCausalLM matched\. Its linears are {kinds}\. Check that"
    ):
        replace_linears(tiny_model(), lambda name: "query" in name)


def test_no_match_in_a_model_without_linears():
    with pytest.raises(ValueError, match="Its linears are none"):
        replace_linears(nn.ReLU(), lambda name: True)


def test_in_features_error_names_the_module():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"good": nn.Linear(16, 8), "odd": nn.Linear(40, 8)})})
    with pytest.raises(ValueError, match=r"^in_features=40 of 'layers\.odd' is not a multiple of 16"):
        replace_linears(model, lambda name: True)


def test_packed_linears_are_named_as_before_peft(tiny_model):
    peft = pytest.importorskip("peft")
    model = tiny_model()
    replaced = replace_linears(model, lambda name: ".layers." in name)
    assert dict(packed_linears(model)) == replaced
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    found = dict(packed_linears(wrapped))
    assert found == replaced
    assert list(found) == NAMES
    assert all(isinstance(linear, NVFP4Linear) for linear in found.values())
