"""The norms of a model that is only norms, and no vLLM; test_worker_on_cpu.py has the engines."""

import pytest
import torch
import torch.nn as nn

from verl_qerl.algos.aqn import AQNConfig, draw_noise
from verl_qerl.vllm_plugin.noise import NormNoise

SIZE = 4096


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))


class Norms(nn.Module):
    """Names as in Qwen3: four kinds of norms in each of two layers, and one at the end."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.input_layernorm, layer.post_attention_layernorm = Norm(SIZE), Norm(SIZE)
            layer.self_attn = nn.Module()
            layer.self_attn.q_norm, layer.self_attn.k_norm = Norm(64), Norm(64)
            layer.self_attn.o_proj = nn.Linear(4, 4)
            self.model.layers.append(layer)
        self.model.norm = Norm(SIZE)


def build(weights_from: int = 0, **options) -> tuple[Norms, NormNoise]:
    torch.manual_seed(weights_from)
    model = Norms()
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape).to(parameter.dtype) * 0.1
    return model, NormNoise(model, AQNConfig(enabled=True, **options))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def changed(before: dict, after: dict) -> set[str]:
    return {name.removesuffix(".weight") for name in before if not torch.equal(before[name], after[name])}


def test_the_checksum_is_that_of_the_noise_that_is_on():
    (_, one), (_, other) = build(), build()
    clean = one.checksum()
    assert clean == other.checksum()
    one.apply(1e-2, 1)
    noisy = one.checksum()
    assert noisy != clean
    for sigma, step, same in ((1e-2, 2, False), (1.001e-2, 1, False), (1e-2, 1, True)):
        other.apply(sigma, step)
        assert (other.checksum() == noisy) == same, (sigma, step)
    one.apply(0.0, 0)
    assert one.checksum() == clean
    norm = other._norms["model.layers.1.input_layernorm"].weight.data
    norm[7] = norm[7].nextafter(torch.tensor(9.0))
    assert other.checksum() != noisy


def test_only_the_norms_of_the_layers_get_noise():
    model, noise = build()
    before = weights(model)
    assert noise.apply(1e-2, 1) == 4
    expected = [
        f"model.layers.{index}.{kind}" for index in range(2) for kind in ("input_layernorm", "post_attention_layernorm")
    ]
    assert noise.names == expected
    assert changed(before, weights(model)) == set(expected)


def test_other_targets():
    _, noise = build(targets=("q_norm", "norm"))
    assert noise.names == ["model.layers.0.self_attn.q_norm", "model.layers.1.self_attn.q_norm", "model.norm"]


@pytest.mark.parametrize("mode", ["additive", "multiplicative"])
def test_noise_is_the_draw_of_seed_step_and_name_times_sigma(mode):
    model, noise = build(mode=mode, seed=5)
    clean = weights(model)["model.layers.1.input_layernorm.weight"]
    noise.apply(1e-2, 7)
    scaled = 1e-2 * draw_noise(5, 7, "model.layers.1.input_layernorm", SIZE)
    expected = clean + scaled if mode == "additive" else clean * (1 + scaled)
    assert torch.equal(model.model.layers[1].input_layernorm.weight, expected)


def test_noise_does_not_accumulate():
    (model, noise), (other, once) = build(), build()
    for step in range(5):
        noise.apply(1e-2, step)
    once.apply(1e-2, 4)
    assert not changed(weights(model), weights(other))


@pytest.mark.parametrize("mode", ["additive", "multiplicative"])
def test_sigma_zero_restores_every_bit(mode):
    model, noise = build(mode=mode)
    before = weights(model)
    noise.apply(0.5, 1)
    noise.apply(1e-3, 2)
    assert changed(before, weights(model))
    noise.apply(0.0, 3)
    assert not changed(before, weights(model))


def test_the_restored_weights_are_those_of_the_checkpoint():
    torch.manual_seed(0)
    model = Norms()
    stored = weights(model)
    NormNoise(model, AQNConfig(enabled=True)).apply(0.0, 1)
    assert all(torch.equal(weights(model)[name].bfloat16(), tensor.bfloat16()) for name, tensor in stored.items())


def test_weights_change_in_place():
    # Captured graphs and compiled code hold the address.
    model, noise = build()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    noise.apply(1e-2, 1)
    noise.recapture()
    noise.apply(0.0, 1)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_two_workers_draw_the_same():
    (first, of_first), (second, of_second) = build(), build()
    torch.manual_seed(99)
    of_first.apply(1e-2, 3)
    of_second.apply(1e-2, 3)
    assert not changed(weights(first), weights(second))
    of_second.apply(1e-2, 4)
    assert len(changed(weights(first), weights(second))) == 4


def test_two_norms_draw_apart():
    model, noise = build()
    before = weights(model)
    noise.apply(1e-2, 1)
    drawn = [weights(model)[f"{name}.weight"] - before[f"{name}.weight"] for name in noise.names]
    correlation = torch.corrcoef(torch.stack(drawn))
    # Independent draws of 4096 numbers correlate by 0.016.
    assert (correlation - torch.eye(4)).abs().max() < 0.08


def test_float32_keeps_the_noise_that_bf16_would_swallow():
    model = Norms()
    NormNoise(model, AQNConfig(enabled=True)).apply(5e-4, 1)
    norm = model.model.layers[0].input_layernorm.weight.detach()
    assert norm.dtype == torch.float32
    assert float((norm - 1).std()) == pytest.approx(5e-4, rel=0.05)
    assert torch.count_nonzero(norm - 1) == SIZE
    # Half a step of bf16 is 2**-8 above 1 and 2**-9 = 3.9 sigma below.
    assert torch.count_nonzero(norm.bfloat16() - 1) < SIZE // 1000


def test_other_norms_keep_their_dtype():
    model, _ = build()
    kinds = {name.split(".")[-2]: parameter.dtype for name, parameter in model.named_parameters() if "norm" in name}
    assert kinds.pop("input_layernorm") == kinds.pop("post_attention_layernorm") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}


def test_after_a_full_sync_the_noise_is_on_the_new_weights():
    (model, noise), (other, expected) = build(), build(weights_from=1)
    noise.apply(1e-2, 2)
    for parameter, synced in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(synced.data)
    noise.recapture()
    expected.apply(1e-2, 2)
    assert not changed(weights(model), weights(other))
    noise.apply(0.0, 2)
    expected.apply(0.0, 2)
    assert not changed(weights(model), weights(other))


@pytest.mark.parametrize(
    ("targets", "lost"), [(["ln_1"], "ln_1"), (["input_layernorm", "o_proj"], "o_proj"), (["layernorm"], "layernorm")]
)
def test_a_target_that_is_not_there(targets, lost):
    kinds = r"\['input_layernorm', 'k_norm', 'norm', 'post_attention_layernorm', 'q_norm'\]"
    with pytest.raises(
        ValueError, match=rf"^Norms has no norms named \['{lost}'\]\. Its norms are {kinds}\. .*\+aqn\.targets="
    ):
        build(targets=targets)


@pytest.mark.parametrize(("mode", "unit"), [("additive", 1.5), ("multiplicative", 1.0)])
def test_noise_keeps_its_size_beside_norms_that_uaq_scaled(mode, unit):
    targets = ("input_layernorm", "q_norm")
    plain, noise = build(mode=mode, targets=targets)
    torch.manual_seed(0)
    scaled = Norms()
    for name, parameter in scaled.named_parameters():
        parameter.data = plain.get_parameter(name).data.float().clone()
        if "layernorm" in name:
            parameter.data *= 1.5
    other = NormNoise(scaled, AQNConfig(enabled=True, mode=mode, targets=targets), 1.5)
    clean = weights(scaled)
    noise.apply(1e-2, 3)
    other.apply(1e-2, 3)
    assert len(other.names) == 4
    for name in other.names:
        grown = 1.5 if name.endswith("input_layernorm") else 1.0
        expected = plain.get_submodule(name).weight * grown
        torch.testing.assert_close(scaled.get_submodule(name).weight, expected, rtol=1e-6, atol=1e-7)
    first = "model.layers.0.input_layernorm"
    z = draw_noise(0, 3, first, SIZE) * (1 if mode == "additive" else clean[f"{first}.weight"])
    expected = clean[f"{first}.weight"] + unit * 1e-2 * z
    torch.testing.assert_close(scaled.get_submodule(first).weight.data, expected, rtol=1e-6, atol=1e-7)
