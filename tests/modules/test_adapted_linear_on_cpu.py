"""A PEFT model whose LoRA linears are fused, against the same model as PEFT computes it."""

import copy

import pytest
import torch
from qerl_testing import assert_close, draw_adapter, quantize, rms_error_ratio

from verl_qerl.kernels.actor.dequantize import dequantize_siblings
from verl_qerl.modules import format_linear
from verl_qerl.modules.convert import replace_linears

peft = pytest.importorskip("peft")
from verl_qerl.modules.adapted_linear import AdaptedLinear, fuse_adapters  # noqa: E402

IDS = torch.arange(24).reshape(2, 12)


def adapt(model, dtype=torch.bfloat16, **options):
    """LoRA on all linears, A and B as if trained."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear", **options)
    model = peft.get_peft_model(model, config)
    draw_adapter(model, seed=0, dtype=dtype)
    return model


@pytest.fixture(params=["packed", "dense"])
def model(tiny_model, request):
    model = tiny_model()
    if request.param == "packed":
        pack(model)
    return adapt(model)


def pack(model) -> None:
    weights = {name: module.weight.detach() for name, module in model.named_modules() if hasattr(module, "weight")}
    for name, linear in replace_linears(model, lambda name: ".layers." in name).items():
        linear.fill(quantize(weights[name]))


def fused(model):
    other = copy.deepcopy(model)
    assert fuse_adapters(other) == 14
    return other


def run(model, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=IDS).logits
    logits.float().logsumexp(-1).sum().backward()
    return {"logits": logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def exact(model) -> dict[str, torch.Tensor]:
    """The same function in float64; a packed weight decodes to float64 as it is."""
    return run(copy.deepcopy(model).double())


def compare(model, **options) -> None:
    """The fused model is as near to the exact one as PEFT's, tensor by tensor."""
    plain, other, truth = run(model, **options), run(fused(model), **options), exact(model)
    assert other.keys() == plain.keys()
    assert len(other) == 1 + 28
    errors = {
        name: (rms_error_ratio(other[name], truth[name]), rms_error_ratio(plain[name], truth[name])) for name in truth
    }
    assert all(found < 0.1 for found, _ in errors.values())
    mean_found, mean_plain = (sum(pair[i] for pair in errors.values()) / len(errors) for i in (0, 1))
    assert mean_found <= 1.15 * mean_plain


def test_as_near_to_float64_as_peft(model):
    compare(model)


def test_in_float32_both_agree(model):
    single = copy.deepcopy(model).float()
    plain, other = run(single), run(fused(single))
    for name, tensor in plain.items():
        assert_close(other[name], tensor, 1e-5)


def test_float32_adapters_under_autocast(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    other = run(fused(model), autocast=True)
    assert {t.dtype for name, t in other.items() if "lora_" in name} == {torch.float32}
    compare(model, autocast=True)


def test_siblings_are_computed_together(model, monkeypatch):
    calls = []
    for module in fused(model).modules():
        if isinstance(module, AdaptedLinear):
            calls.append(module._siblings)
    sizes = sorted(len(siblings.members) for siblings in set(calls))
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3]  # o, down; gate and up; q, k and v


def test_checkpointing_changes_no_bit_and_decodes_twice(tiny_model, monkeypatch):
    model = tiny_model()
    pack(model)
    model = adapt(model).train()
    model.enable_input_require_grads()
    fuse_adapters(model)
    decoded = []
    count = lambda weights, dtype: decoded.append(len(weights)) or dequantize_siblings(weights, dtype)  # noqa: E731
    monkeypatch.setattr(format_linear, "dequantize_siblings", count)
    plain = run(model)
    assert sorted(decoded) == sorted([3, 1, 2, 1] * 2 * 2)  # q, k and v; o; gate and up; down: of two layers, each pass
    decoded.clear()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = run(model)
    assert all(torch.equal(tensor, checkpointed[name]) for name, tensor in plain.items())
    # Forward, and once for recomputation and backward together.
    assert sorted(decoded) == sorted([3, 1, 2, 1] * 2 * 2)
    assert not any(module._siblings._recomputed for module in model.modules() if isinstance(module, AdaptedLinear))


def test_names_and_states_are_pefts(model):
    other = fused(model)
    assert list(other.state_dict()) == list(model.state_dict())
    assert list(peft.get_peft_model_state_dict(other)) == list(peft.get_peft_model_state_dict(model))


def test_nothing_waits_after_a_pass(model):
    other = fused(model)
    run(other)
    waiting = [m._siblings for m in other.modules() if isinstance(m, AdaptedLinear)]
    assert all(not siblings._waiting and siblings._input is None for siblings in waiting)


def test_another_input_is_another_output(model):
    other = fused(model)
    mlp = other.base_model.model.model.layers[0].mlp
    x, z = (torch.randn(3, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    gate = mlp.gate_proj(x)
    up = mlp.up_proj(z)  # not the one that waits for x
    assert torch.equal(up, mlp.up_proj(z.clone()))
    assert not torch.equal(up, mlp.up_proj(x.clone()))
    assert torch.equal(mlp.gate_proj(x), gate)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}], ids=str)
def test_what_is_not_plain_stays_pefts(tiny_model, options):
    model = adapt(tiny_model(), **options).train()
    other = copy.deepcopy(model)
    fuse_adapters(other)
    torch.manual_seed(0)
    expected = run(model)
    torch.manual_seed(0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run(other).items())


def test_without_an_adapter_and_with_two(model):
    other = fused(model)
    with torch.no_grad():
        with model.disable_adapter(), other.disable_adapter():
            assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)
        for each in (model, other):
            each.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
            each.base_model.set_adapter(["default", "second"])
        assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_float32_adapters_without_autocast_stay_pefts(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    expected, found = run(model), run(fused(model))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_second_call_turns_nothing(model):
    other = fused(model)
    assert fuse_adapters(other) == 0
