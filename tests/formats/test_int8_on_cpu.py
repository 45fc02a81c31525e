import pytest
import torch

from verl_qerl.formats import INT8
from verl_qerl.formats.reference import dequantize

FORMAT = INT8()


def test_channels_by_hand():
    # Row 0: amax 127, scale 1: values are rounded, ties to even, and -0.0 has no code of its own.
    # Row 1: amax 0.5, scale 0.5 / 127; 0.25 lies at 63.5, between two codes, and goes to the even one.
    weight = torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, -0.0, 126.6, 3.0], [0.5, 0.25, -0.25, 0, 0, 0, 0, 0]])
    found = FORMAT.quantize(weight)
    assert found.codes.dtype == torch.int8
    assert found.block_scale.dtype == torch.float32
    assert found.block_scale.tolist() == [[1.0], [pytest.approx(0.5 / 127, rel=1e-7)]]
    assert found.codes.tolist() == [[127, -127, 0, 2, -2, 0, 127, 3], [127, 64, -64, 0, 0, 0, 0, 0]]
    assert dequantize(found, torch.float32)[0].tolist() == [127.0, -127.0, 0.0, 2.0, -2.0, 0.0, 127.0, 3.0]


def test_the_most_negative_code_is_never_used():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert int(FORMAT.quantize(-weight.abs()).codes.min()) == -127


def test_the_error_is_at_most_half_a_step():
    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    found = FORMAT.quantize(weight)
    error = (dequantize(found, torch.float32) - weight.float()).abs()
    assert bool((error <= found.block_scale * 0.5001).all())
