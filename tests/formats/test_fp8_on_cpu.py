import pytest
import torch

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FP8
from verl_qerl.formats.reference import dequantize

FORMAT = FP8()


def test_channels_by_hand():
    # Row 0: amax 448, scale 1. 17 lies between 16 and 18 and goes to the even mantissa, 16; 19 to 20. 2**-10 is half of
    # the smallest subnormal, 2**-9, and goes to zero; a little more does not. Signs stay, that of zero too.
    weight = torch.tensor(
        [[448.0, -448.0, 17.0, 19.0, -0.0, 2.0**-10, 1.01 * 2.0**-10, 300.0], [0.5, -0.25, *[0.0] * 6]]
    )
    found = FORMAT.quantize(weight)
    assert found.codes.dtype == torch.float8_e4m3fn
    assert found.block_scale.tolist() == [[1.0], [pytest.approx(0.5 / 448, rel=1e-7)]]
    row = [448.0, -448.0, 16.0, 20.0, 0.0, 0.0, 2.0**-9, 288.0]
    assert dequantize(found, torch.float32)[0].tolist() == row
    assert found.codes.view(torch.uint8)[0].tolist() == [0x7E, 0xFE, 0x58, 0x5A, 0x80, 0x00, 0x01, 0x79]
    assert found.codes.view(torch.uint8)[1, :2].tolist() == [0x7E, 0xF6]  # -448, and -224 = -1.75 * 2**7


def test_the_largest_number_saturates_and_is_never_nan():
    weight = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(-30, 30, (512, 1))
    found = FORMAT.quantize(weight)
    magnitude = found.codes.float().abs()
    assert bool(torch.isfinite(magnitude).all())
    assert bool((magnitude.amax(dim=1) == 448).all())


def test_the_error_is_at_most_half_a_step_of_its_binade():
    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    found = FORMAT.quantize(weight)
    error = (dequantize(found, torch.float32) - weight.float()).abs()
    allowed = torch.maximum(weight.float().abs() / 16, found.block_scale * 2.0**-10)
    assert bool((error <= allowed * 1.0001).all())


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_both_nans_are_refused(byte):
    tensors = FORMAT.to_tensors(FORMAT.quantize(torch.ones(2, 64)))
    FORMAT.from_tensors("m", tensors)
    tensors["weight"].view(torch.uint8)[1, 3] = byte
    with pytest.raises(CheckpointFormatError, match=r"m is no weight in FP8: its codes are not all numbers"):
        FORMAT.from_tensors("m", tensors)
