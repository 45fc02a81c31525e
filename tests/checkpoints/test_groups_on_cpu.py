from dataclasses import replace

import pytest
import torch

from verl_qerl.checkpoints.groups import groups_of_linears, in_groups, linears_among
from verl_qerl.formats import MXFP4, NVFP4
from verl_qerl.formats.ignore import ROUTER

Q, K, V, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
SHAPES = {f"{module}.weight": (32, 64) for module in (Q, K, V, OUT)} | {
    f"{Q}.bias": (32,),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.embed_tokens.weight": (512, 64),
    "lm_head.weight": (512, 64),
}


def test_matrices_of_the_layers_are_quantized():
    assert linears_among(SHAPES, None, "the model") == {Q, K, V, OUT}
    assert linears_among(SHAPES, ["re:.*(q|k|v)_proj"], "the model") == {OUT}


@pytest.mark.parametrize(
    ("ignore", "block_size", "sentence"),
    [
        ("re:.*o_proj", 16, r"^no list of modules: ignore='re:\.\*o_proj'\. Accepted are .* in a list"),
        ([1], 16, r"^no list of modules: ignore=\[1\]"),
        (["lm_head", "o_proj"], 16, r"^nothing is ignored by 'o_proj': no module of the model matches\. An exact"),
        (["re:.*o_porj"], 16, r"^nothing is ignored by 're:\.\*o_porj': no module of the model matches"),
        (["re:.*"], 16, r"the model holds no linear to quantize: ignore=\['re:\.\*'\]"),
        ([K], 16, r"ignored in part: ignored=\['model\.layers\.0\.self_attn\.k_proj'\]"),
        (None, 128, r"in_features=64 of '.*' is not a multiple of 128\. MXFP4 cannot hold this weight"),
    ],
)
def test_what_cannot_be_quantized_is_refused(ignore, block_size, sentence):
    with pytest.raises(ValueError, match=sentence):
        linears_among(SHAPES, ignore, "the model", replace(MXFP4(), block_size=block_size))


def test_a_model_without_a_head_takes_the_default():
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert linears_among(tied, ["lm_head", ROUTER], "the model") == {Q, K, V, OUT}


def test_only_formats_that_share_a_scale_quantize_linears_together():
    assert groups_of_linears({V, OUT, Q, K}, NVFP4()) == [[K, Q, V], [OUT]]
    assert groups_of_linears({V, OUT}, MXFP4()) == [[OUT], [V]]


def test_a_group_comes_when_its_last_member_does():
    names = [f"{V}.weight", f"{Q}.bias", f"{OUT}.weight", f"{Q}.weight", "lm_head.weight", f"{K}.weight"]
    tensors = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}
    found = list(in_groups(tensors.items(), {Q, K, V, OUT}))
    assert [name for name, _ in found] == [
        f"{Q}.bias",
        OUT,
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
    ]
    assert found[-1][1] == {V: torch.tensor([0.0]), Q: torch.tensor([3.0]), K: torch.tensor([5.0])}
    alone = [
        name for name, item in in_groups(tensors.items(), {Q, K, V, OUT}, together=False) if isinstance(item, dict)
    ]
    assert alone == [V, OUT, Q, K]


def test_a_member_that_never_comes_is_an_error():
    tensors = [(f"{Q}.weight", torch.ones(1)), (f"{K}.weight", torch.ones(1))]
    with pytest.raises(
        ValueError, match=r"the weights of 1 groups of linears have not all come, first '.*q_proj\+k_pr"
    ):
        list(in_groups(tensors, {Q, K, V}))
    assert len(list(in_groups(tensors, {Q, K}))) == 1  # a model without the third member
