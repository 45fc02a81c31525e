import pytest
import torch
from qerl_testing import quantize, quantize_group, sqnr_db

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats import PackedWeight, base
from verl_qerl.formats.e2m1 import E2M1_VALUES
from verl_qerl.formats.nvfp4 import SCALE_CHOICES
from verl_qerl.formats.reference import dequantize, relative_error


def codes_of(weight: PackedWeight) -> list[list[int]]:
    """One list of 4-bit codes a row, low nibble first."""
    return [[nibble for byte in row for nibble in (byte & 15, byte >> 4)] for row in weight.codes.tolist()]


def scale_bytes(weight: PackedWeight) -> list[list[int]]:
    return weight.block_scale.view(torch.uint8).tolist()


def gaussian(N: int, K: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def test_a_block_by_hand() -> None:
    # amax 6: 2688 / 6 = 448, the power of two below is 256. Block scale 6 * 256 / 6 = 256 = 2**8: E4M3 byte 0_1111_000.
    # Values over 256 / 256 are the values themselves, so their codes are 0 .. 15, even k in the low nibble.
    weight = quantize(torch.tensor([E2M1_VALUES]), "minmax")
    assert weight.global_decode_scale == 1 / 256
    assert scale_bytes(weight) == [[0b0_1111_000]]
    assert [f"{byte:02x}" for byte in weight.codes[0].tolist()] == ["10", "32", "54", "76", "98", "ba", "dc", "fe"]
    assert dequantize(weight, torch.float32).tolist() == [list(E2M1_VALUES)]


def test_block_scales_round_to_e4m3_and_the_amax_saturates() -> None:
    # amax 5: 2688 / 5 = 537.6, power of two 512.
    # First block: 5 * 512 / 6 = 426.7 lies between 416 and 448 and rounds to 416 = 2**8 * 1.625: byte 0_1111_101.
    #   5 * 512 / 416 = 6.15 saturates at 6, decoded 6 * 416 / 512 = 4.875. 1 * 512 / 416 = 1.23 -> 1 -> 0.8125.
    # Second block: 1 * 512 / 6 = 85.3 lies between 80 and 88 and rounds to 88 = 2**6 * 1.375: byte 0_1101_011.
    #   1 * 512 / 88 = 5.8 -> 6 -> 1.03125.
    values = torch.zeros(1, 32)
    values[0, 0], values[0, 1], values[0, 16] = 5.0, -1.0, 1.0
    weight = quantize(values, "minmax")
    assert weight.global_decode_scale == 1 / 512
    assert scale_bytes(weight) == [[0b0_1111_101, 0b0_1101_011]]
    codes = codes_of(weight)[0]
    assert (codes[0], codes[1], codes[16]) == (7, 8 + 2, 7)
    decoded = dequantize(weight, torch.float32)[0]
    assert (decoded[0], decoded[1], decoded[16]) == (4.875, -0.8125, 1.03125)


@pytest.mark.parametrize(
    ("value", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)], ids=str
)
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(value: float, code: int) -> None:
    below = torch.nextafter(torch.tensor(value), torch.tensor(0.0)).item()
    above = torch.nextafter(torch.tensor(value), torch.tensor(9.0)).item()
    lower = max(i for i in range(8) if E2M1_VALUES[i] < value)
    block = [6.0, value, below, above, -value, -below, -above, *[0.0] * 9]  # amax 6: block scale and factor cancel
    found = codes_of(quantize(torch.tensor([block]), "minmax"))[0]
    assert found[1:4] == [code, lower, lower + 1]
    assert found[4:7] == [8 + code, 8 + lower, 8 + lower + 1]
    assert code % 2 == 0


def test_signed_zero_survives() -> None:
    weight = quantize(torch.tensor([[0.0, -0.0, 1.0, *[-0.0] * 13]]))
    assert codes_of(weight)[0][:2] == [0, 8]
    assert codes_of(weight)[0][3:] == [8] * 13
    assert torch.signbit(dequantize(weight)[0]).tolist() == [False, True, False, *[True] * 13]


def test_zero_and_tiny_blocks_have_the_smallest_normal_scale() -> None:
    values = torch.zeros(2, 32)
    values[0, 0], values[0, 16] = 1.0, 1e-9
    weight = quantize(values)
    smallest = 0b0_0001_000  # 2**-6; Marlin reads anything smaller as zero
    assert scale_bytes(weight)[0][1] == smallest
    assert scale_bytes(weight)[1] == [smallest, smallest]
    assert codes_of(weight)[1] == [0] * 32
    assert not dequantize(weight)[1].any()


@pytest.mark.parametrize("scale", SCALE_CHOICES)
def test_a_zero_weight_stays_zero(scale: str) -> None:
    weight = quantize(torch.zeros(4, 32), scale)
    assert not dequantize(weight).any()
    assert weight.global_decode_scale == 1
    assert relative_error(torch.zeros(4, 32), weight) == 0


@pytest.mark.parametrize("scale", SCALE_CHOICES)
@pytest.mark.parametrize("amax", [1e-30, 3e-5, 0.7, 1.0, 6.0, 447.9, 3e38], ids=str)
def test_global_scale_is_the_power_of_two_that_fills_the_range(scale: str, amax: float) -> None:
    values = torch.full((1, 16), amax)
    weight = quantize(values, scale)
    assert torch.frexp(weight.global_decode_scale).mantissa == 0.5
    largest = 448 if scale == "minmax" else 256
    block_scale = amax / 6 / float(weight.global_decode_scale)  # before rounding and before the factor
    assert largest / 2 < block_scale <= largest or amax == 1e-30  # the encode scale ends at 2**126
    assert weight.block_scale.float().max() <= 448
    assert relative_error(values, weight) < 0.07  # half a step of the E4M3 scale, and of E2M1 around 4 to 6


@pytest.mark.parametrize("scale", SCALE_CHOICES)
def test_block_scales_stay_in_range_whatever_the_spread(scale: str) -> None:
    values = gaussian(64, 256) * torch.logspace(-12, 4, 64)[:, None]
    scales = quantize(values, scale).block_scale.float()
    assert scales.min() == 2**-6
    assert scales.max() <= 448


@pytest.mark.parametrize("scale", SCALE_CHOICES)
def test_bf16_dequantization_is_exact(scale: str) -> None:
    weight = quantize(gaussian(64, 256), scale)
    assert torch.equal(dequantize(weight).double(), dequantize(weight, torch.float64))


def test_fused_group_shares_the_scale_of_its_largest_member() -> None:
    members = {"q": gaussian(32, 64, 1), "k": gaussian(16, 64, 2) * 50, "v": gaussian(16, 64, 3)}
    together = quantize_group(members)
    assert {float(weight.global_decode_scale) for weight in together.values()} == {
        float(quantize(members["k"]).global_decode_scale)
    }
    alone = quantize(members["q"])
    assert alone.global_decode_scale < together["q"].global_decode_scale
    assert relative_error(members["q"], together["q"]) < 0.11  # the block scales take up the difference


def block_errors(values: torch.Tensor, scale: str) -> torch.Tensor:
    error = dequantize(quantize(values, scale), torch.float64) - values.double()
    return error.square().view(values.shape[0], -1, 16).sum(dim=-1)


def all_block_errors(values: torch.Tensor, encode: float) -> torch.Tensor:
    """[scales, blocks] float64: squared errors with every block scale that the format allows."""
    blocks = values.double().reshape(-1, 16) * encode
    grid, errors = torch.tensor(E2M1_VALUES[:8]).double(), []
    for byte in range(0x08, 0x7F):
        scale = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        distances = (blocks.abs()[..., None] / scale - grid).abs().amin(-1)
        errors.append((distances * scale / encode).square().sum(-1))
    return torch.stack(errors)


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_mse_finds_the_best_of_all_block_scales(power: int) -> None:
    values = gaussian(64, 512, power).float().div(0.02)
    values = values.sign() * values.abs() ** power
    found = block_errors(values, "mse").view(-1)
    minmax = block_errors(values, "minmax").view(-1)
    best = all_block_errors(values, 1 / float(quantize(values, "mse").global_decode_scale)).amin(0)
    slack = 1 + 1e-5  # the search compares float32 sums
    assert (found <= minmax * slack).all()
    assert (found < minmax).float().mean() > 0.2
    assert (found <= best * slack).all()


@pytest.mark.parametrize(("scale", "expected"), [("minmax", 20.4), ("mse", 21.8)])
def test_signal_to_noise_ratio_of_a_gaussian(scale: str, expected: float) -> None:
    # Measured; compressed-tensors' own minmax gives the same 20.4 dB on a Gaussian (relative MSE 0.0091). Allowed
    # is sampling noise, while reading nibbles in the wrong order or a block scale one step off costs decibels.
    values = gaussian(256, 4096)
    assert sqnr_db(dequantize(quantize(values, scale)), values) == pytest.approx(expected, abs=0.1)


def test_minmax_equals_compressed_tensors_quantization_with_our_scales() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    from verl_qerl.formats import NVFP4
    from verl_qerl.formats.base import named_tensors

    values = gaussian(64, 256).float()
    ours = named_tensors("m", quantize(values))
    scheme = QuantizationScheme.model_validate(NVFP4().config()["config_groups"]["group_0"])
    state = {
        "weight": values,
        "weight_scale": ours["m.weight_scale"].float(),
        "weight_global_scale": ours["m.weight_global_scale"],
    }
    theirs = NVFP4PackedCompressor.compress(state, scheme)["weight_packed"]
    nonzero = (ours["m.weight_packed"] & 0x77) != 0  # they store no negative zero
    assert torch.equal(theirs[nonzero] & 0x77, ours["m.weight_packed"][nonzero] & 0x77)


@pytest.mark.parametrize("scale", SCALE_CHOICES)
@pytest.mark.parametrize("chunk", [1, 100, 64 * 7, 1 << 24], ids=str)
def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch, scale: str, chunk: int) -> None:
    values = gaussian(37, 64)
    whole = quantize(values, scale)
    error = relative_error(values, whole)
    monkeypatch.setitem(base._CHUNK_ELEMENTS, "cpu", chunk)
    assert weight_digest(quantize(values, scale)) == weight_digest(whole)
    assert relative_error(values, whole) == pytest.approx(error, rel=1e-6)


def test_relative_error_is_that_of_the_definition() -> None:
    values = gaussian(64, 128)
    weight = quantize(values)
    expected = (dequantize(weight, torch.float64) - values.double()).norm() / values.double().norm()
    assert relative_error(values, weight) == pytest.approx(float(expected), rel=1e-5)


def test_a_transposed_view_is_quantized_as_its_copy() -> None:
    values = gaussian(64, 32).t()
    assert not values.is_contiguous()
    assert weight_digest(quantize(values)) == weight_digest(quantize(values.contiguous()))


# Of integers, so that no random generator is involved. A change means that checkpoints and running replicas disagree.
_GOLDEN = {"minmax": "f5986d823ec6f3a8", "mse": "2a9f572769fdd960"}


@pytest.mark.parametrize("scale", SCALE_CHOICES)
def test_golden_bits(scale: str) -> None:
    values = ((torch.arange(48 * 96) * 7919 % 2003) - 1001).view(48, 96).float()
    values = (values / torch.arange(1, 49)[:, None] / 4096).bfloat16()
    assert weight_digest(quantize(values, scale)) == _GOLDEN[scale]


def test_unknown_scale_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown scale choice: scale='max'"):
        quantize(torch.ones(2, 16), "max")
