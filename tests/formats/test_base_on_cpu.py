import pytest
import torch

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats import FORMATS, get_format
from verl_qerl.formats.reference import dequantize

NAMES = sorted(FORMATS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(name, bad):
    weight = torch.ones(4, 64)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match=r"'model.q' holds 1 NaN or infinite values. \w+ holds finite weights only."):
        get_format(name).quantize_group({"fine": torch.ones(4, 64), "model.q": weight})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(64),
        torch.ones(2, 2, 64),
        torch.ones(0, 64),
        torch.ones(2, 64, dtype=torch.int32),
        torch.ones(2, 64).to(torch.float8_e4m3fn),
        torch.ones(2, 64).to(torch.float8_e5m2),
    ],
    ids=["vector", "stack", "empty", "int", "e4m3", "e5m2"],
)
def test_only_matrices_of_floats_are_held(name, weight):
    with pytest.raises(ValueError, match="holds float matrices"):
        get_format(name).quantize(weight)


@pytest.mark.parametrize(("name", "K"), [("mxfp4", 48), ("nvfp4", 24), ("nvfp4", 4097)])
def test_blocks_must_divide_the_rows(name, K):
    with pytest.raises(
        ValueError, match=rf"in_features={K} of 'w' is not a multiple of .*Add 're:\.\*w\$' to `ignore`"
    ):
        get_format(name).quantize(torch.ones(4, K), "w")


@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_weight_has_the_parts_and_comes_back_as_itself(name):
    form = get_format(name)
    weight = (torch.randn(48, 128, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    found = form.quantize(weight)
    assert tuple(form.to_tensors(found)) == form.parts
    decoded = dequantize(found)
    assert (decoded.shape, decoded.dtype) == (weight.shape, torch.bfloat16)
    again = dequantize(form.quantize(dequantize(found, torch.float32)), torch.float32)
    assert torch.allclose(again, dequantize(found, torch.float32), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_input_dtypes_that_hold_the_same_values_give_the_same_bits(name, dtype):
    form = get_format(name)
    weight = torch.randint(-64, 65, (16, 64), generator=torch.Generator().manual_seed(0)).float() / 64
    one, other = form.quantize(weight.bfloat16()), form.quantize(weight.to(dtype))
    assert weight_digest(one) == weight_digest(other)


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_is_shared_where_the_format_says_so(name):
    form = get_format(name)
    generator = torch.Generator().manual_seed(0)
    group = {"q": torch.randn(32, 64, generator=generator), "k": torch.randn(16, 64, generator=generator) * 1e-3}
    together = form.quantize_group(group)
    alone = {member: form.quantize(weight) for member, weight in group.items()}
    same = all(weight_digest(together[member]) == weight_digest(alone[member]) for member in group)
    assert same is not form.shares_scale


@pytest.mark.parametrize("name", NAMES)
def test_the_description_is_one_that_compressed_tensors_reads(name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationScheme

    form = get_format(name)
    config = form.config(["lm_head", "re:.*down_proj"])
    assert config["ignore"] == ["lm_head", "re:.*down_proj"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    assert scheme.weights is not None
    assert scheme.weights.num_bits == (4 if form.block_size > 1 else 8)
    assert (scheme.input_activations is not None) is form.quantizes_activations


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"format='int4'. Accepted are fp8, int8, mxfp4, nvfp4"):
        get_format("int4")
