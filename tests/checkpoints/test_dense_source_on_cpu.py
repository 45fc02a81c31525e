"""Quantized checkpoints of several kinds, made up, and the dense ones that they stand for."""

import json

import pytest
import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints.dense_source import dense_source
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import check_held, packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, get_format
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.nvfp4_layout import modelopt_config
from verl_qerl.formats.reference import dequantize

LINEAR = "model.layers.0.mlp.down_proj"
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}


@pytest.fixture
def write(tmp_path):
    def make(tensors, config):
        others = {"model.norm.weight": torch.ones(80), f"{LINEAR}.bias": torch.ones(48)}
        others["model.layers.0.self_attn.o_proj.weight"] = torch.ones(16, 64).bfloat16()
        save_file(others | tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        return open_source(tmp_path)

    return make


def values(seed=0):
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("name", [*sorted(FORMATS), "modelopt"])
def test_each_format_stands_for_what_it_dequantizes_to(write, name):
    form = get_format("nvfp4" if name == "modelopt" else name)
    packed = form.quantize(values())
    layout, config = ("modelopt", modelopt_config(["lm_head"])) if name == "modelopt" else ("", form.config())
    tensors = named_tensors(LINEAR, packed, layout or "compressed-tensors")
    source = dense_source(write(tensors | {f"{LINEAR}.input_scale": torch.ones(1)}, config))
    found = dict(source.tensors())
    assert torch.equal(found[f"{LINEAR}.weight"], dequantize(packed))
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in found.items()} == {
        "model.norm.weight": ((80,), torch.float32),
        f"{LINEAR}.bias": ((48,), torch.float32),
        f"{LINEAR}.weight": ((48, 64), torch.bfloat16),
        "model.layers.0.self_attn.o_proj.weight": ((16, 64), torch.bfloat16),
    }
    assert {key: spec.shape for key, spec in source.specs.items()} == {
        key: tuple(tensor.shape) for key, tensor in found.items()
    }
    assert source.format is None
    assert source.linears(["lm_head"]) - source.modules == {"model.layers.0.self_attn.o_proj"}


def fp8_config(strategy, **weights):
    config = get_format("fp8").config()
    config["config_groups"]["group_0"]["weights"] |= {"strategy": strategy, **weights}
    config["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    return config


SCALES = {
    "a tensor": ("weight_scale", (), fp8_config("tensor")),
    "a tensor, in a vector": ("weight_scale", (1,), fp8_config("tensor")),
    "a row": ("weight_scale", (48, 1), fp8_config("channel")),
    "a row, in a vector": ("weight_scale", (48,), fp8_config("channel")),
    "a block": ("weight_scale", (2, 4), fp8_config("block", block_structure=[32, 16])),
    "a block, as DeepSeek": ("weight_scale_inv", (2, 4), DEEPSEEK),
}


@pytest.mark.parametrize("case", SCALES)
def test_fp8_is_read_with_its_scales(write, case):
    part, shape, config = SCALES[case]
    codes = (values() * 1000).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    source = write({f"{LINEAR}.weight": codes, f"{LINEAR}.{part}": scale}, config)
    with pytest.raises(CheckpointFormatError, match=r"with other arguments: .*dynamic=False|in another format: fine"):
        check_held(source, get_format("fp8"))  # neither side computes with it
    found = dict(dense_source(source).tensors())[f"{LINEAR}.weight"]
    for n, k in ((0, 0), (31, 15), (32, 16), (47, 63)):
        flat = scale.reshape(-1)
        one = scale[n // 32, k // 16] if shape == (2, 4) else flat[n if len(flat) > 1 else 0]
        assert found[n, k] == (codes[n, k].float() * one).bfloat16(), (n, k)


@pytest.mark.parametrize("block", ["x", 3, [32], [32, "x"], [0, 16]])
def test_blocks_of_another_kind_are_refused(write, block):
    tensors = {f"{LINEAR}.weight": values().to(torch.float8_e4m3fn), f"{LINEAR}.weight_scale_inv": torch.ones(2, 4)}
    source = dense_source(write(tensors, DEEPSEEK | {"weight_block_size": block}))
    with pytest.raises(
        CheckpointFormatError, match=r"has scales \(2, 4\) for a weight \(48, 64\), blocks .*Accepted are"
    ):
        dict(source.tensors())


@pytest.mark.parametrize("form", ["nvfp4", "int8"])
def test_deepseeks_blocks_are_refused_by_rollout_and_actor_with_the_remedy(write, form):
    tensors = {f"{LINEAR}.weight": values().to(torch.float8_e4m3fn), f"{LINEAR}.weight_scale_inv": torch.ones(2, 4)}
    sentence = rf"in another format: finegrained-fp8, and {form} is asked for\. .* Point .*quantize --requantize --fo"
    with pytest.raises(CheckpointFormatError, match=sentence):
        check_held(write(tensors, DEEPSEEK), get_format(form))


def test_a_packed_head_is_dense_again(write):
    form = get_format("nvfp4")
    tensors = {}
    for module in (LINEAR, "lm_head"):
        tensors |= named_tensors(module, form.quantize(values()))
    source = dense_source(write(tensors, form.config([])))
    items = dict(packed_stream(source, form, ["lm_head", "re:.*o_proj"]))
    assert items["lm_head.weight"].dtype == torch.bfloat16
    assert not isinstance(items[LINEAR], torch.Tensor)


WRONG = {
    "a zero point": (
        {
            "weight": torch.ones(48, 64).char(),
            "weight_scale": torch.ones(48, 1),
            "weight_zero_point": torch.ones(48, 1),
        },
        r"is stored as weight, weight_scale, weight_zero_point\. Accepted are weight and weight_scale\.",
    ),
    "scales of another shape": (
        {"weight": torch.ones(48, 64).char(), "weight_scale": torch.ones(3, 5)},
        r"has scales \(3, 5\) for a weight \(48, 64\), blocks None\. Accepted are one, one a row, or one a block\.",
    ),
    "no codes": ({"weight_scale": torch.ones(48, 1)}, r"holds scales and no codes of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_refused(write, case):
    parts, sentence = WRONG[case]
    source = write({f"{LINEAR}.{part}": tensor for part, tensor in parts.items()}, get_format("int8").config())
    with pytest.raises(CheckpointFormatError, match=sentence):
        list(dense_source(source).tensors())
