"""The copy in E4M3 against float64: how far its weights and its products are from those of the packed weight."""

import pytest
import torch

pytest.importorskip("vllm")
from verl_qerl.formats import DEFAULT_FORMAT, PackedWeight, reference
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.rollout.repacking import repack
from verl_qerl.vllm_plugin.weights import fp8_copy
from verl_qerl.vllm_plugin.weights.fp8_copy import FEWEST_ROWS, make_copy, multiply_fp8, quantize_rows, takes_fp8

N, K = 256, 512


def packed(values: torch.Tensor) -> PackedWeight:
    return DEFAULT_FORMAT.quantize(values.bfloat16())


@pytest.fixture(params=["normal", "outliers"])
def weight(request) -> PackedWeight:
    """Of Gaussian weights, and of rows of which some weights are a hundred times as large."""
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.02
    if request.param == "outliers":
        values[:, ::97] *= 100
    return packed(values)


def decoded(copy: list[torch.Tensor]) -> torch.Tensor:
    codes, scales = copy
    return codes.double() * scales.double()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_weights_are_those_of_the_packed_ones_up_to_a_rounding_of_e4m3(weight):
    exact = reference.dequantize(weight, torch.float64)
    copy = make_copy(*repack(weight))
    codes, scales = copy
    assert (codes.shape, codes.dtype) == ((N, K), torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == ((N, 1), torch.float32)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))  # powers of two
    # E4M3 rounds by at most 2**-4 of a weight, or by half of its least number.
    limit = exact.abs() * 2.0**-4 + 2.0**-10 * scales.double()
    assert bool(((decoded(copy) - exact).abs() <= limit).all())
    # 1.96 % of Gaussian weights, of which 79 % stay exact; with scales max |w| / 448 it is 2.72 %, and 13 % do.
    assert relative(decoded(copy), exact) < 0.021


@pytest.mark.parametrize(
    ("amax", "exponent", "code"), [(448.0, 0, 448.0), (450.0, 1, 224.0), (1.0, -8, 256.0), (0.875, -9, 448.0)], ids=str
)
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_row(amax, exponent, code):
    codes, scale = quantize_rows(torch.tensor([[amax, -amax / 4], [0.0, 0.0]], dtype=torch.bfloat16))
    assert (scale[0].item(), codes[0, 0].float().item()) == (2.0**exponent, code)
    assert not codes[1].float().any()


def test_codes_without_a_mantissa_stay_exact():
    powers = torch.tensor([0, 1, 2, 4, 6])  # of codes 0, 0.5, 1, 2, 4
    codes = powers[torch.randint(5, (64, 64), generator=torch.Generator().manual_seed(0))]
    packed_codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale = torch.arange(256).view(64, 4) % 24 + 0x50  # three powers of two in E4M3, every mantissa
    weight = nvfp4_weight(packed_codes, scale.to(torch.uint8).view(torch.float8_e4m3fn), torch.tensor(2.0**-11))
    assert torch.equal(decoded(make_copy(*repack(weight))), reference.dequantize(weight, torch.float64))


def test_a_weight_is_decoded_in_pieces(weight, monkeypatch):
    whole = make_copy(*repack(weight))
    monkeypatch.setattr(fp8_copy, "_WEIGHTS_AT_ONCE", 64 * K)
    for found, expected in zip(make_copy(*repack(weight)), whole, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_products_are_close_to_those_in_float64(weight):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(FEWEST_ROWS, K, generator=generator).bfloat16()
    x[3] *= 1000  # each token has a scale of its own
    bias = torch.randn(N, generator=generator).bfloat16()
    exact = x.double() @ reference.dequantize(weight, torch.float64).T
    copy = make_copy(*repack(weight))
    y = multiply_fp8(x, copy, None)
    assert (y.shape, y.dtype) == ((FEWEST_ROWS, N), torch.bfloat16)
    errors = torch.tensor([relative(row, wanted) for row, wanted in zip(y, exact, strict=True)])
    assert 0.01 < errors.mean() < 0.036  # activations in E4M3 alone: 2.6 %
    assert errors[3] < 0.05
    with_bias = multiply_fp8(x, copy, bias)
    assert torch.allclose(with_bias.float(), y.float() + bias.float(), rtol=2**-7, atol=1e-2)


def test_from_which_row_on():
    copy = [torch.zeros(1), torch.zeros(1)]
    assert [takes_fp8(rows, copy) for rows in (1, FEWEST_ROWS - 1, FEWEST_ROWS, 8192)] == [False, False, True, True]
    assert not takes_fp8(8192, [])
