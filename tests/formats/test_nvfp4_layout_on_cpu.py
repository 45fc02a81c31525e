import logging

import pytest
import torch
from qerl_testing import quantize, random_packed_weight

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.formats.nvfp4_layout import fused_group, is_activation_scale
from verl_qerl.formats.reference import dequantize


def without_module(tensors: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items()}


def modelopt(weight: PackedWeight) -> dict[str, torch.Tensor]:
    return {"weight": weight.codes, "weight_scale": weight.block_scale, "weight_scale_2": weight.global_decode_scale}


def test_stored_global_scale_multiplies_to_encode() -> None:
    # amax 6 gives the encode scale 256, which is what compressed-tensors stores; we hold its inverse.
    weight = quantize(torch.tensor([[6.0, *[0.0] * 15]]))
    tensors = named_tensors("m", weight)
    assert sorted(tensors) == ["m.weight_global_scale", "m.weight_packed", "m.weight_scale"]
    assert tensors["m.weight_global_scale"].tolist() == [256.0]
    assert tensors["m.weight_packed"] is weight.codes
    assert NVFP4().from_tensors("m", without_module(tensors, "m"), "compressed-tensors").global_decode_scale == 1 / 256


def test_compressed_tensors_names_round_trip() -> None:
    weight = random_packed_weight(32, 64)
    back = NVFP4().from_tensors("a.b", without_module(named_tensors("a.b", weight), "a.b"), "compressed-tensors")
    assert weight_digest(back) == weight_digest(weight)


def test_modelopt_names_hold_the_decode_scale() -> None:
    weight = random_packed_weight(32, 64)
    assert weight_digest(NVFP4().from_tensors("m", modelopt(weight), "modelopt")) == weight_digest(weight)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2"])
def test_a_missing_part_is_named(name: str) -> None:
    tensors = modelopt(random_packed_weight(16, 32))
    del tensors[name]
    with pytest.raises(CheckpointFormatError, match=rf"^m lacks \['{name}'\]"):
        NVFP4().from_tensors("m", tensors, "modelopt")


def test_parts_that_do_not_fit_name_the_module() -> None:
    tensors = modelopt(random_packed_weight(16, 32))
    tensors["weight_scale"] = tensors["weight_scale"].float()
    with pytest.raises(
        CheckpointFormatError, match=r"layer\.3 is no weight in NVFP4: weight_scale of NVFP4 is torch.float8_e4m3fn"
    ):
        NVFP4().from_tensors("layer.3", tensors, "modelopt")


def test_subnormal_block_scales_are_read_as_zero_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    weight = random_packed_weight(4, 48)
    scale = weight.block_scale.float()
    scale[1, 0], scale[2, 2], scale[3, 1] = 2.0**-9, 2.0**-7, 2.0**-6  # the last is normal
    stored = nvfp4_weight(weight.codes, scale.to(torch.float8_e4m3fn), weight.global_decode_scale)
    with caplog.at_level(logging.WARNING):
        found = NVFP4().from_tensors("m", modelopt(stored), "modelopt")
    expected = dequantize(stored)
    expected[1, :16], expected[2, 32:] = 0, 0
    assert torch.equal(dequantize(found), expected)
    assert expected[3, 16:32].any()
    assert found.block_scale.float().min() == 2.0**-6
    assert "m: 2 block scales below 2**-6 are zero in Marlin" in caplog.text


def test_normal_block_scales_are_read_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    NVFP4().from_tensors("m", modelopt(random_packed_weight(4, 48)), "modelopt")
    assert caplog.text == ""


def test_config_is_what_compressed_tensors_accepts() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    config = NVFP4().config(["lm_head", "re:.*down_proj"])
    parsed = QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    assert parsed.format == scheme.format == "nvfp4-pack-quantized"
    assert (scheme.weights.num_bits, scheme.weights.group_size, scheme.weights.strategy) == (4, 16, "tensor_group")
    assert scheme.input_activations is None
    assert parsed.ignore == ["lm_head", "re:.*down_proj"]


def test_groups_are_those_that_vllm_fuses() -> None:
    key, members = fused_group("model.layers.3.self_attn.k_proj")
    assert members == tuple(f"model.layers.3.self_attn.{kind}_proj" for kind in "qkv")
    assert fused_group("model.layers.3.self_attn.q_proj")[0] == key
    assert fused_group("model.layers.4.self_attn.q_proj")[0] != key
    assert fused_group("l.mlp.up_proj")[1] == ("l.mlp.gate_proj", "l.mlp.up_proj")
    assert fused_group("l.mlp.down_proj") == ("l.mlp.down_proj", ("l.mlp.down_proj",))


def test_activation_scales_are_recognized() -> None:
    assert is_activation_scale("a.input_scale")
    assert is_activation_scale("a.input_global_scale")
    assert is_activation_scale("a.self_attn.k_proj.k_scale")
    assert not is_activation_scale("a.self_attn.k_scale")  # vLLM's own place for it: what loads it decides
    assert not is_activation_scale("a.weight_scale")


@pytest.mark.parametrize("value", [[0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 1.0, 1.0], []], ids=str)
def test_a_damaged_global_scale_is_refused(value):
    tensors = named_tensors("m", random_packed_weight(2, 16))
    parts = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    parts["weight_global_scale"] = torch.tensor(value)
    with pytest.raises(CheckpointFormatError, match="m is no weight in NVFP4: its global scale is"):
        NVFP4().from_tensors("m", parts, "compressed-tensors")


@pytest.mark.parametrize("byte", [0x7F, 0xB8], ids=["nan", "negative"])
def test_a_damaged_block_scale_is_refused(byte):
    packed = random_packed_weight(2, 32)
    parts = {name.removeprefix("m."): tensor.clone() for name, tensor in named_tensors("m", packed).items()}
    parts["weight_scale"].view(torch.uint8)[1, 1] = byte
    with pytest.raises(CheckpointFormatError, match="its block scales are not all numbers from 0 to 448"):
        NVFP4().from_tensors("m", parts, "compressed-tensors")


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("part", ["weight_g_idx", "pre_quant_scale", "weight_zero_point"])
def test_a_tensor_beside_the_weight_is_refused(layout, part):
    parts = {
        name.removeprefix("m."): tensor
        for name, tensor in named_tensors("m", random_packed_weight(2, 16), layout).items()
    }
    with pytest.raises(CheckpointFormatError, match=rf"m has \['{part}'\] beside what a weight in NVFP4 is made of"):
        NVFP4().from_tensors("m", parts | {part: torch.ones(2)}, layout)


def with_blocks(low, high, decode):
    """A weight whose block scales lie between `low` and `high`, of other numbers in each block, one of them zeros."""
    codes = torch.arange(2 * 32, dtype=torch.uint8).view(2, 32) * 3
    codes[1, 8:16] = 0x80  # 0.0 and -0.0
    scale = torch.tensor([[low, high, low, high], [high, 2.0**-6, high, low]]).to(torch.float8_e4m3fn)
    return nvfp4_weight(codes, scale, torch.tensor(decode))


# (least and largest block scale, global scale) of two members; the last two span more than E4M3 has.
FOLDS = {
    "the smaller takes it": ((1.0, 448.0, 1.0), (1.0, 448.0, 0.25), True),
    "up to the largest": ((0.5, 28.0, 16.0), (0.5, 448.0, 1.0), True),
    "down to the smallest": ((2.0**-6, 448.0, 1.0), (2.0**-3, 448.0, 0.125), True),
    "no powers of two, but their ratio": ((1.0, 448.0, 0.3), (1.0, 224.0, 0.6), True),
    "below the smallest": ((2.0**-6, 448.0, 1.0), (2.0**-4, 448.0, 0.125), False),
    "of no power of two": ((1.0, 2.0, 1.0), (1.0, 2.0, 0.75), False),
}


@pytest.mark.parametrize("case", FOLDS)
def test_global_scales_that_differ_by_powers_of_two_go_into_the_block_scales(case):
    *members, exact = FOLDS[case]
    weights = {name: with_blocks(*numbers) for name, numbers in zip("ab", members, strict=True)}
    if not exact:
        with pytest.raises(CheckpointFormatError, match=r"different global scales: \{'a': 1\.0, 'b': 0\."):
            NVFP4().with_shared_scale(weights)
        return
    found = NVFP4().with_shared_scale(weights)
    assert found["a"].global_decode_scale == found["b"].global_decode_scale
    for name, weight in weights.items():
        assert torch.equal(dequantize(found[name], torch.float32), dequantize(weight, torch.float32))
        assert torch.equal(found[name].codes, weight.codes)
        assert found[name].block_scale.float().min() >= 2.0**-6


def test_a_group_of_zeros_shares_a_scale():
    zero = random_packed_weight(2, 16)
    zero.codes.zero_()
    other = nvfp4_weight(zero.codes, zero.block_scale, zero.global_decode_scale * 4)
    found = NVFP4().with_shared_scale({"a": zero, "b": other})
    assert found["a"].global_decode_scale == found["b"].global_decode_scale
    assert not dequantize(found["a"]).any()
    one = random_packed_weight(2, 16, seed=1)
    found = NVFP4().with_shared_scale({"a": other, "b": one})
    assert torch.equal(dequantize(found["b"]), dequantize(one))
