import pytest
import torch

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import MXFP4
from verl_qerl.formats.e2m1 import E2M1_VALUES
from verl_qerl.formats.reference import dequantize

FORMAT = MXFP4()


def block(*values: float) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def exponent(weight: torch.Tensor) -> int:
    return int(FORMAT.quantize(weight).block_scale) - 127


def test_every_code_by_hand():
    # amax 6 is below 7: exponent 0, and the values are the codes 0 .. 15, even k in the low nibble.
    weight = block(*E2M1_VALUES)
    found = FORMAT.quantize(weight)
    assert [tensor.dtype for tensor in found.tensors] == [torch.uint8, torch.uint8]
    assert found.block_scale.tolist() == [[127]]
    expected = ["10", "32", "54", "76", "98", "ba", "dc", "fe", *["00"] * 8]
    assert [f"{byte:02x}" for byte in found.codes[0].tolist()] == expected
    decoded = dequantize(found, torch.float32)
    assert torch.equal(decoded, weight)
    assert torch.equal(torch.signbit(decoded), torch.signbit(weight))


@pytest.mark.parametrize(
    ("amax", "wanted"),
    [(6.0, 0), (6.99, 0), (7.0, 1), (8.0, 1), (13.99, 1), (14.0, 2), (3.5, 0), (3.49, -1), (1.0, -2), (0.75, -3)],
)
def test_the_exponent_puts_the_largest_magnitude_below_seven(amax, wanted):
    assert exponent(block(amax)) == exponent(block(-amax)) == wanted


def test_rounding_saturates_at_six_and_ties_go_to_the_even_code():
    found = dequantize(FORMAT.quantize(block(6.9, 5.0, 2.5, 3.5, -0.25, 0.26)), torch.float32)
    assert found[0, :6].tolist() == [6.0, 4.0, 2.0, 4.0, -0.0, 0.5]


def test_blocks_have_scales_of_their_own():
    weight = torch.cat([block(6.0), block(96.0), block(0.0)], dim=1)
    found = FORMAT.quantize(weight)
    assert found.block_scale.tolist() == [[127, 131, 127]]
    assert torch.equal(dequantize(found, torch.float32), weight)


def test_the_range_is_that_of_bf16():
    assert exponent(block(3.3e38)) == 125
    assert exponent(block(1e-40)) == -125
    found = dequantize(FORMAT.quantize(block(3.3e38, 1e-3)))
    assert bool(torch.isfinite(found).all())


def test_the_weight_is_exact_in_bf16():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    found = FORMAT.quantize(weight)
    assert torch.equal(dequantize(found, torch.float32), dequantize(found, torch.bfloat16).float())


def test_scales_and_codes_are_those_of_compressed_tensors():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    found = FORMAT.quantize(weight)
    amax = weight.view(64, 8, 32).abs().amax(dim=-1)
    assert torch.equal(generate_mx_scales(amax).to(torch.uint8), found.block_scale)
    scheme = QuantizationScheme.model_validate(FORMAT.config()["config_groups"]["group_0"])
    packed = FORMAT.to_tensors(found)
    decoded = MXFP4PackedCompressor.decompress(packed, scheme)["weight"]
    assert torch.equal(decoded.float(), dequantize(found, torch.float32))


@pytest.mark.parametrize("byte", [0, 1, 253, 255])
def test_exponents_at_both_ends_are_refused(byte):
    tensors = FORMAT.to_tensors(FORMAT.quantize(torch.ones(2, 64)))
    FORMAT.from_tensors("m", tensors)
    tensors["weight_scale"][1, 1] = byte
    with pytest.raises(
        CheckpointFormatError, match="m is no weight in MXFP4: its exponents are not all within 125 of 0"
    ):
        FORMAT.from_tensors("m", tensors)
