"""Norms that follow the actor's: on a model that is only norms, and in an engine."""

import pytest
import torch
import torch.nn as nn
from qerl_testing import assert_close, float32_norms

from verl_qerl.algos.aqn import AQNConfig, draw_noise
from verl_qerl.vllm_plugin.adapter.buffers import flatten
from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise
from verl_qerl.vllm_plugin.noise.synced_norms import SyncedNorms, split_shifts

KINDS = ("input_layernorm", "post_attention_layernorm")
NAMES = [f"model.layers.{index}.{kind}" for index in range(2) for kind in KINDS]
SIZE = 64


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE).bfloat16())


def build(**aqn) -> tuple[nn.Module, NormNoise | None, SyncedNorms]:
    torch.manual_seed(0)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
    for layer in model.model.layers:
        for kind in (*KINDS, "q_norm"):
            layer.register_module(kind, Norm())
    noise = NormNoise(model, AQNConfig(enabled=True, **aqn)) if aqn else None
    return model, noise, SyncedNorms(model, noise)


def random_shifts(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SIZE, 1, generator=generator).bfloat16() * 1e-3 for name in NAMES}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removesuffix(".weight"): parameter.data.clone() for name, parameter in model.named_parameters()}


def expected(base: dict, shifts: dict) -> dict[str, torch.Tensor]:
    return {name: base[name] + shifts[name][:, 0].float() for name in NAMES}


def assert_equal(found: dict, wanted: dict) -> None:
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_each_sync_adds_to_the_base_in_place():
    model, _, norms = build()
    base = weights(model)
    storage = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for seed in (1, 2):
        shifts = random_shifts(seed)
        norms.check(shifts)
        norms.place(shifts)
        assert_equal(weights(model), expected(base, shifts))
    assert weights(model)[NAMES[0]].dtype == torch.float32
    assert torch.equal(weights(model)["model.layers.0.q_norm"], base["model.layers.0.q_norm"])
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == storage


@pytest.mark.parametrize("targets", [KINDS, ("q_norm", "input_layernorm")], ids=str)
def test_noise_goes_on_top_of_what_was_synced(targets):
    model, noise, norms = build(seed=3, targets=targets)
    base = weights(model)
    noise.apply(1e-2, 5)
    shifts = random_shifts(1)
    norms.place(shifts)
    clean = {**base, **expected(base, shifts)}
    noisy = {
        name: weight + (1e-2 * draw_noise(3, 5, name, SIZE) if name.rpartition(".")[2] in targets else 0)
        for name, weight in clean.items()
    }
    assert_equal(weights(model), noisy)
    noise.apply(0.0, 0)
    assert_equal(weights(model), clean)
    noise.apply(1e-2, 5)
    assert_equal(weights(model), noisy)


@pytest.mark.parametrize("aqn", [{}, {"targets": KINDS}, {"targets": ("input_layernorm",)}], ids=str)
def test_norms_that_did_not_arrive_are_told(aqn):
    model, noise, norms = build(**aqn)
    if noise is not None:
        noise.apply(1e-2, 5)
    norms.place(random_shifts(1))
    norms.require_placed(random_shifts(1))
    with pytest.raises(ValueError, match=r"^the rollout does not hold the norms that came"):
        norms.require_placed(random_shifts(2))
    norms.place(random_shifts(2))
    norms.require_placed(random_shifts(2))
    held = model.model.layers[1].post_attention_layernorm.weight.data if noise is None else noise.clean[NAMES[0]]
    held[5] += 1e-3
    with pytest.raises(ValueError, match=r"^the rollout does not hold the norms that came"):
        norms.require_placed(random_shifts(2))


def test_what_does_not_fit_is_refused():
    _, _, norms = build()
    shifts = random_shifts(1)
    short = {**shifts, NAMES[2]: torch.zeros(8, 1)}
    with pytest.raises(ValueError, match=rf"'{NAMES[2]}' of 8 numbers, here of 64 \(1 differ\)"):
        norms.check(short)
    with pytest.raises(ValueError, match=rf"'{NAMES[0]}' of None numbers, here of 64 \(4 differ\)"):
        norms.check({})
    with pytest.raises(ValueError, match=r"'model\.norm' of 64 numbers, here of None \(1 differ\)"):
        norms.check({**shifts, "model.norm": torch.zeros(64)})


def test_a_model_without_these_norms():
    with pytest.raises(ValueError, match=r"has no norms named .* Leave out \+qerl\.base\.train_norms\."):
        SyncedNorms(nn.Linear(2, 2))


def test_the_adapter_comes_first_and_its_numbers_stay():
    tensors = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2) * 2}
    shifts = {f"base_model.model.{name}.adapter_shift": torch.full((SIZE, 1), 3.0) for name in NAMES}
    layout, flat, found = split_shifts(*flatten(tensors | shifts, torch.bfloat16))
    expected_layout, expected_flat = flatten(tensors, torch.bfloat16)
    assert layout == expected_layout
    assert torch.equal(flat, expected_flat)
    assert list(found) == NAMES
    assert all(torch.equal(shift, torch.full((SIZE, 1), 3.0).bfloat16()) for shift in found.values())
    assert split_shifts(expected_layout, expected_flat)[2] == {}
    with pytest.raises(ValueError, match="the shifts of norms do not come last: 4 among 6 tensors"):
        split_shifts(*flatten(shifts | tensors, torch.bfloat16))


# In engines.


@pytest.fixture(scope="module")
def synced(start, packed_dir):
    return start(packed_dir, aqn={"enabled": True}, additional={"train_norms": True})


def place(worker, shifts: dict) -> None:
    worker._qerl_norms.check(shifts)
    worker._qerl_norms.place(shifts)


def rpc(engine, method, *args):
    answer = engine.collective_rpc(method, args=args)
    assert engine.reset_prefix_cache()
    return answer[0]


@pytest.fixture(scope="module")
def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: (torch.randn(128, 1, generator=generator) * 0.2).bfloat16() for name in NAMES}


ZEROS = {name: torch.zeros(128, 1) for name in NAMES}


def test_after_a_sync_the_engine_is_a_model_with_these_norms(
    synced, drawn, reference_model, reference_log_probs, prompt_log_probs
):
    model = reference_model()
    expected = [reference_log_probs(model)]
    for name, shift in drawn.items():
        model.get_submodule(name).weight.data += shift[:, 0].float()
    expected.append(reference_log_probs(model))
    untrained = prompt_log_probs(synced)
    rpc(synced, place, drawn)
    trained = prompt_log_probs(synced)
    change = expected[1] - expected[0]
    assert change.abs().mean() > 0.1
    assert_close(trained - untrained, change, 0.05)
    rpc(synced, "qerl_set_noise", 1e-2, 3)
    noisy = prompt_log_probs(synced)
    assert 0 < (noisy - trained).abs().mean() < change.abs().mean() / 3
    rpc(synced, "qerl_set_noise", 0.0, 0)
    assert torch.equal(prompt_log_probs(synced), trained)
    rpc(synced, place, ZEROS)
    assert torch.equal(prompt_log_probs(synced), untrained)


def test_changes_below_the_resolution_of_bf16_arrive(synced, drawn, prompt_log_probs):
    before = prompt_log_probs(synced)
    rpc(synced, place, {name: shift * 2**-8 for name, shift in drawn.items()})
    (held,) = synced.collective_rpc(float32_norms)
    assert all((weight.bfloat16() == 1).float().mean() > 0.9 for weight in held.values())
    assert torch.count_nonzero(prompt_log_probs(synced) - before) > 150
    rpc(synced, place, ZEROS)


def test_norms_are_prepared_without_noise_too(start, packed_dir, drawn, synced, prompt_log_probs):
    quiet = start(packed_dir, additional={"train_norms": True})
    for engine in (quiet, synced):
        rpc(engine, place, drawn)
    assert torch.equal(prompt_log_probs(quiet), prompt_log_probs(synced))
    assert list(quiet.collective_rpc(float32_norms)[0]) == NAMES
    with pytest.raises(ValueError, match="started without noise"):
        rpc(quiet, "qerl_set_noise", 1e-2, 1)
    rpc(synced, place, ZEROS)
