"""Norms that are trained beside an adapter of PEFT; under verl's engine they are in test_engine_norms_on_cpu.py."""

import pytest
import torch
import torch.nn as nn

peft = pytest.importorskip("peft")
from verl_qerl.modules.trained_norm import TrainedNorm, train_norms  # noqa: E402

IDS = torch.arange(24).reshape(2, 12)
SHIFTS = [
    f"base_model.model.model.layers.{index}.{kind}.modules_to_save.default.adapter_shift"
    for index in range(2)
    for kind in ("input_layernorm", "post_attention_layernorm")
]


@pytest.fixture
def model(tiny_model):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    model = peft.get_peft_model(tiny_model().bfloat16(), config)
    assert train_norms(model) == 4
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_shifts_are_trained_and_weights_are_not(model):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "norm" in name}
    assert list(trained) == SHIFTS
    assert all(p.dtype == torch.float32 and not p.any() for p in trained.values())
    weights = [name for name, p in model.named_parameters() if "layernorm" in name and not p.requires_grad]
    assert len(weights) == 4


def test_a_norm_adds_its_shift_in_float32():
    norm = torch.nn.RMSNorm(64, eps=1e-6)
    norm.weight.data.normal_(1, 0.1)
    norm.weight.data = norm.weight.data.bfloat16()
    trained = TrainedNorm(norm)
    x = torch.randn(3, 64).bfloat16()
    shift = torch.randn(64) * 1e-3
    trained.modules_to_save["default"].adapter_shift.data.copy_(shift)
    expected = torch.nn.functional.rms_norm(x.float(), (64,), norm.weight.float() + shift, 1e-6).bfloat16()
    assert torch.equal(trained(x), expected)
    rounded = torch.nn.functional.rms_norm(x.float(), (64,), (norm.weight.float() + shift).bfloat16().float(), 1e-6)
    assert not torch.equal(trained(x), rounded.bfloat16()), "the change is below what bf16 tells from the weight"


def test_gradients_reach_the_shift_and_the_input():
    norm = torch.nn.RMSNorm(8, eps=1e-6)
    trained = TrainedNorm(norm)
    x = torch.randn(5, 8, requires_grad=True)
    grad = torch.randn(5, 8)
    trained(x).backward(grad)
    found = trained.modules_to_save["default"].adapter_shift.grad
    normalized = x.detach() / (x.detach().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found, (grad * normalized).sum(0))
    assert norm.weight.grad is None
    assert x.grad.any()


def test_without_the_adapter_it_is_the_norm_of_the_base(model):
    before = logits(model)
    for name in SHIFTS:
        model.get_parameter(name).data.fill_(0.2)
    assert not torch.equal(logits(model), before)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)  # B of the adapter is 0
    assert model.get_parameter(SHIFTS[0]).requires_grad


def test_peft_saves_them_with_the_adapter(model):
    saved = peft.get_peft_model_state_dict(model)
    assert len(saved) == 28 + 4
    assert [name for name in saved if "lora_" not in name] == [
        name.replace(".modules_to_save.default", "") for name in SHIFTS
    ]


@pytest.mark.parametrize("damage", ["no layers", "no norm", "a bias"])
def test_a_model_with_other_norms_is_refused_as_it_is(tiny_model, damage):
    model = tiny_model()
    reasons = {
        "no layers": "the model has no decoder layers",
        "no norm": r"model\.layers\.1 has no post_attention_layernorm",
        "a bias": r"model\.layers\.1\.input_layernorm has the parameters \{'weight': \(\d+,\), 'bias'",
    }
    layer = model.model.layers[1]
    if damage == "no layers":
        model.model.layers = nn.ModuleList()
    elif damage == "no norm":
        layer.post_norm = layer.post_attention_layernorm
        del layer.post_attention_layernorm
    else:
        layer.input_layernorm = nn.LayerNorm(layer.input_layernorm.weight.numel())
    with pytest.raises(ValueError, match=rf"^the norms of this model cannot be trained: {reasons[damage]}.* Leave out"):
        train_norms(model)
    assert not any(isinstance(module, TrainedNorm) for module in model.modules())


def test_the_norm_of_the_base_rounds_where_the_trained_one_does():
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    norm = Qwen2RMSNorm(64)
    norm.weight.data = norm.weight.data.normal_(1, 0.3).bfloat16()
    trained, x = TrainedNorm(norm), torch.randn(32, 64).bfloat16()
    before = trained(x)  # the shift is zero
    assert not torch.equal(before, norm(x)), "transformers' rounds before it multiplies"
    trained.enable_adapters(False)
    assert torch.equal(trained(x), before)
