"""The norms of a model that is only norms, and no vLLM; test_worker_on_cpu.py has the engines."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from verl_qerl.algos.aqn import MODES, AQNConfig, draw_noise, norm_rms
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise, check_model

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
    assert list(noise.clean) == expected
    assert changed(before, weights(model)) == set(expected)


def test_other_targets():
    _, noise = build(targets=("q_norm", "norm"))
    assert list(noise.clean) == ["model.layers.0.self_attn.q_norm", "model.layers.1.self_attn.q_norm", "model.norm"]


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_the_draw_of_seed_step_and_name_times_sigma(mode):
    model, noise = build(mode=mode, seed=5)
    clean = weights(model)["model.layers.1.input_layernorm.weight"]
    noise.apply(1e-2, 7)
    scaled = 1e-2 * draw_noise(5, 7, "model.layers.1.input_layernorm", SIZE)
    relative = clean + (1e-2 * norm_rms(clean)).float() * draw_noise(5, 7, "model.layers.1.input_layernorm", SIZE)
    expected = {"additive": clean + scaled, "multiplicative": clean * (1 + scaled), "relative": relative}[mode]
    assert torch.equal(model.model.layers[1].input_layernorm.weight, expected)


def test_noise_does_not_accumulate():
    (model, noise), (other, once) = build(), build()
    for step in range(5):
        noise.apply(1e-2, step)
    once.apply(1e-2, 4)
    assert not changed(weights(model), weights(other))


@pytest.mark.parametrize("mode", MODES)
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


@pytest.mark.parametrize("draws", [False, True])
def test_synced_weights_are_rounded_as_norms_without_noise_are(draws):
    tables = (
        (lambda norms: {name: torch.zeros(3, norm.weight.numel()) for name, norm in norms.items()}) if draws else None
    )
    model = Norms()
    noise = NormNoise(model, AQNConfig(enabled=True, targets=("input_layernorm",)), 1.0, tables)
    norm = model.model.layers[0].input_layernorm
    norm.weight.data.fill_(1.001)  # a master; bf16 has 1 and 1.0078
    noise.recapture(torch.bfloat16)
    assert noise.clean["model.layers.0.input_layernorm"].unique().tolist() == [1.0]
    assert norm.weight.unique().tolist() == [1.0]


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
    drawn = [weights(model)[f"{name}.weight"] - before[f"{name}.weight"] for name in noise.clean]
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


def test_relative_noise_follows_the_weights_of_a_sync():
    model, noise = build(mode="relative")
    name = "model.layers.0.input_layernorm"
    before = dict(noise.sizes())
    noise.apply(1e-2, 2)
    with torch.no_grad():
        for norm in (layer.input_layernorm for layer in model.model.layers):
            norm.weight.copy_(20 * noise.clean[name])
    noise.recapture()
    assert noise.sizes()[name] == pytest.approx(20 * before[name], rel=1e-6)
    moved = model.get_submodule(name).weight.data - noise.clean[name]
    assert float(moved.std()) == pytest.approx(0.2 * before[name], rel=0.05)


def test_noise_that_acts_is_counted():
    model, noise = build()
    assert noise.num_noisy() == 0
    noise.apply(1e-6, 1)
    assert noise.num_noisy() == 4
    with torch.no_grad():
        name = list(noise.clean)[2]
        model.get_submodule(name).weight.copy_(noise.clean[name])
    assert noise.num_noisy() == 3
    noise.apply(0.0, 1)
    assert noise.num_noisy() == 0


def test_sizes_are_root_mean_squares_without_what_uaq_multiplied():
    model, noise = build(targets=("input_layernorm", "q_norm"))
    kept = weights(model)
    plain = {name: float(kept[f"{name}.weight"].double().square().mean().sqrt()) for name in noise.clean}
    assert noise.sizes() == pytest.approx(plain, rel=1e-12)
    noise.apply(0.3, 1)
    assert noise.sizes() == pytest.approx(plain, rel=1e-12)  # of the clean weights
    noise.apply(0.0, 1)
    scaled = NormNoise(model, AQNConfig(enabled=True, targets=("input_layernorm", "q_norm")), 2.0).sizes()
    halved = {name: size / 2 if "layernorm" in name else size for name, size in plain.items()}
    assert scaled == pytest.approx(halved, rel=1e-12)


def test_relative_noise_on_norms_of_zeros_is_refused():
    model, noise = build(mode="relative")
    model.model.layers[1].input_layernorm.weight.data.zero_()
    noise.recapture()
    told = (
        r"^aqn\.mode=relative has no unit where a norm's weights are all zero: model\.layers\.1\.input_layernorm"
        r" \(1 of 4 norms\)\. Accepted are norms with weights\. Set `\+aqn\.mode=additive`\.$"
    )
    for call in (lambda: noise.apply(1e-2, 1), noise.sizes):
        with pytest.raises(ValueError, match=told):
            call()
    assert noise.apply(0.0, 1) == 4
    other, additive = build()
    other.model.layers[1].input_layernorm.weight.data.zero_()
    additive.recapture()
    assert additive.apply(1e-2, 1) == 4
    assert additive.sizes()["model.layers.1.input_layernorm"] == 0.0


def test_norms_that_multiply_by_one_plus_their_weight_take_additive_noise_alone():
    vllm = pytest.importorskip("vllm.model_executor.layers.layernorm")
    model = nn.Module()
    model.pre_feedforward_layernorm = object.__new__(vllm.GemmaRMSNorm)
    nn.Module.__init__(model.pre_feedforward_layernorm)
    model.pre_feedforward_layernorm.weight = nn.Parameter(torch.zeros(8))
    targets = ("pre_feedforward_layernorm",)
    for mode in ("multiplicative", "relative"):
        with pytest.raises(
            ValueError,
            match=rf"^aqn\.mode={mode} takes a norm's weight for its unit, and pre_feedforward_layernorm multiplies by"
            r" 1 \+ weight\. Accepted is additive\. Set `\+aqn\.mode=additive`\.$",
        ):
            NormNoise(model, AQNConfig(enabled=True, mode=mode, targets=targets))
    assert NormNoise(model, AQNConfig(enabled=True, targets=targets)).apply(1e-2, 1) == 1


def of_family(family):
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type=family)))


def test_a_family_with_its_norms_elsewhere_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^it is not known where model_type=gemma2 has the norms"):
        check_model(of_family("gemma2"), AQNConfig(enabled=True))
    check_model(of_family("gemma2"), AQNConfig(enabled=True, targets=("pre_feedforward_layernorm",)))


def test_noise_that_reaches_routers_is_told(caplog):
    say_once.cache_clear()
    check_model(of_family("qwen3"), AQNConfig(enabled=True))
    assert not caplog.messages
    check_model(of_family("qwen3_moe"), AQNConfig(enabled=True))
    assert caplog.messages == [
        "verl_qerl: noise on post_attention_layernorm also reaches the routers of qwen3_moe, which read that norm."
    ]


@pytest.mark.parametrize(("mode", "unit"), [("additive", 1.5), ("multiplicative", 1.0), ("relative", 1.0)])
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
    assert len(other.clean) == 4
    for name in other.clean:
        grown = 1.5 if name.endswith("input_layernorm") else 1.0
        expected = plain.get_submodule(name).weight * grown
        torch.testing.assert_close(scaled.get_submodule(name).weight, expected, rtol=1e-6, atol=1e-7)
    first = "model.layers.0.input_layernorm"
    weight = clean[f"{first}.weight"]
    units = {"additive": 1.0, "multiplicative": weight, "relative": norm_rms(weight).float()}
    z = draw_noise(0, 3, first, SIZE) * units[mode]
    expected = clean[f"{first}.weight"] + unit * 1e-2 * z
    torch.testing.assert_close(scaled.get_submodule(first).weight.data, expected, rtol=1e-6, atol=1e-7)
