import pytest
import torch
from qerl_testing import quantize_group

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.e2m1 import E2M1_VALUES, e2m1_codes
from verl_qerl.formats.gptq import DAMPING, InputMoments, calibrate, output_errors
from verl_qerl.formats.reference import dequantize, relative_error


def correlated(tokens: int, K: int) -> torch.Tensor:
    """[tokens, K] inputs as models have them: some columns far larger than others, none independent of the rest."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(tokens, K, generator=generator) @ torch.randn(K, K, generator=generator)
    return (mixed * torch.rand(K, generator=generator).mul(3).square()).bfloat16()


def moments_of(inputs: torch.Tensor) -> torch.Tensor:
    moments = InputMoments(inputs.shape[-1], "cpu")
    for part in inputs.split(100):
        moments.add(part[None])
    return moments.matrix()


def group(K: int, *rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"linear {N}": (torch.randn(N, K, generator=generator) * 0.02).bfloat16() for N in rows}


def optimal_brain_quantizer(
    weight: torch.Tensor, rounded: PackedWeight, moments: torch.Tensor, order: list[int]
) -> torch.Tensor:
    """Equations 1 to 3 of the GPTQ paper word by word in float64: the inverse loses a row and a column at each step."""
    scales = rounded.block_scale.double() * rounded.global_decode_scale.double()
    w, values, result = weight.double(), torch.tensor(E2M1_VALUES, dtype=torch.float64), torch.zeros_like(weight)
    inverse = torch.linalg.inv(moments.double() + DAMPING * moments.diagonal().mean() * torch.eye(len(moments)))
    for k in order:
        codes = e2m1_codes((w[:, k] / scales[:, k // 16]).float())
        quantized = values[codes.int()] * scales[:, k // 16]
        result[:, k] = quantized
        w = w - ((w[:, k] - quantized) / inverse[k, k])[:, None] * inverse[k]
        inverse = inverse - inverse[:, k : k + 1] @ inverse[k : k + 1] / inverse[k, k]
        inverse[k], inverse[:, k] = 0.0, 0.0
    return result


@pytest.mark.parametrize("K", [64, 208], ids=lambda K: f"{K} columns")
def test_the_codes_are_those_of_the_paper(K: int) -> None:
    weights, moments = group(K, 48, 16), moments_of(correlated(500, K))
    rounded = quantize_group(weights)
    order = sorted(range(K), key=lambda k: -float(moments[k, k]))
    for name, found in calibrate(weights, rounded, moments).items():
        expected = optimal_brain_quantizer(weights[name], rounded[name], moments, order)
        assert torch.equal(dequantize(found), expected), name


def test_moments_are_means_over_all_inputs() -> None:
    inputs = correlated(300, 1040)  # more columns than a stripe has
    expected = inputs.double().t() @ inputs.double() / 300
    torch.testing.assert_close(moments_of(inputs).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))
    assert not InputMoments(16, "cpu").matrix().any()


def test_outputs_change_less_than_with_the_nearest_codes() -> None:
    K, inputs = 256, correlated(1000, 256)
    weights, moments = group(K, 64), moments_of(inputs[:800])
    (weight,), (rounded,) = weights.values(), quantize_group(weights).values()
    (found,) = calibrate(weights, quantize_group(weights), moments).values()

    def measured(packed: PackedWeight, some: torch.Tensor) -> float:
        expected = some.double() @ weight.double().t()
        return float((some.double() @ dequantize(packed).double().t() - expected).norm() / expected.norm())

    expected = [measured(one, inputs[:800]) for one in (found, rounded)]
    assert output_errors(weight, (found, rounded), moments) == pytest.approx(expected, rel=1e-3)
    assert measured(found, inputs[:800]) < 0.75 * measured(rounded, inputs[:800])
    assert measured(found, inputs[800:]) < 0.8 * measured(rounded, inputs[800:])  # and on others
    assert relative_error(weight, found) > relative_error(weight, rounded)


def test_scales_stay_and_codes_are_the_same_every_time() -> None:
    weights, moments = group(96, 32, 48), moments_of(correlated(400, 96))
    rounded = quantize_group(weights, "minmax")
    once, again = (calibrate(weights, rounded, moments) for _ in range(2))
    for name, weight in once.items():
        assert torch.equal(weight.block_scale.view(torch.uint8), rounded[name].block_scale.view(torch.uint8))
        assert torch.equal(weight.global_decode_scale, rounded[name].global_decode_scale)
        assert torch.equal(weight.codes, again[name].codes)
        assert not torch.equal(weight.codes, rounded[name].codes)


def test_inputs_that_say_nothing_leave_the_nearest_codes() -> None:
    weights = group(64, 16)
    (name,), rounded = weights, quantize_group(weights)
    for moments in (torch.zeros(64, 64), torch.eye(64)):
        assert torch.equal(calibrate(weights, rounded, moments)[name].codes, rounded[name].codes)
    inputs = correlated(300, 64)
    inputs[:, 5] = 0  # an input that is never used
    dead = calibrate(weights, rounded, moments_of(inputs))[name]
    assert torch.equal(dequantize(dead)[:, 5], dequantize(rounded[name])[:, 5])


def test_fewer_tokens_than_columns_are_enough_for_the_arithmetic() -> None:
    weights, moments = group(128, 32), moments_of(correlated(20, 128))
    rounded = quantize_group(weights)
    (name,), found = weights, calibrate(weights, rounded, moments)
    few, nearest = output_errors(weights[name], (found[name], rounded[name]), moments)
    assert few < nearest / 2


def test_outputs_of_a_weight_of_zeros_have_no_error() -> None:
    weight = torch.zeros(16, 32)
    assert output_errors(weight, [quantize_group({"w": weight})["w"]], torch.eye(32)) == [0.0]


def test_inputs_that_are_not_finite_are_refused() -> None:
    weights = group(64, 16)
    inputs = correlated(100, 64)
    inputs[3, 5] = torch.inf
    with pytest.raises(ValueError, match="inputs of 'linear 16' are NaN or infinite"):
        calibrate(weights, quantize_group(weights), moments_of(inputs))
