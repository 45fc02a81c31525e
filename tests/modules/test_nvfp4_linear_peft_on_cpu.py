"""PEFT takes an NVFP4Linear for the nn.Linear that it is."""

import pytest
import torch
from qerl_testing import quantize

from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.convert import replace_linears
from verl_qerl.modules.format_linear import NVFP4Linear

peft = pytest.importorskip("peft")

IDS = torch.arange(24).reshape(2, 12)


def in_layers(name: str) -> bool:
    return ".layers." in name


def pack(model) -> dict[str, NVFP4Linear]:
    weights = {name: module.weight.detach() for name, module in model.named_modules() if hasattr(module, "weight")}
    linears = replace_linears(model, in_layers)
    for name, linear in linears.items():
        linear.fill(quantize(weights[name]))
    return linears


def round_weights(model) -> None:
    """Give the dense model the values of the packed one."""
    for name, module in model.named_modules():
        if in_layers(name) and isinstance(module, torch.nn.Linear):
            module.weight.data = dequantize(quantize(module.weight.detach()))


def add_lora(model, trained: bool = False):
    """LoRA on all linears, B not zero when it is to look trained."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # A too: on a bf16 weight PEFT rounds its first values to bf16, on a packed one it does not.
        if "lora_A" in name or ("lora_B" in name and trained):
            parameter.data.normal_(std=0.05, generator=generator)
    return model


@pytest.fixture
def packed(tiny_model):
    model = tiny_model()
    pack(model)
    return model


@pytest.fixture
def dense(tiny_model):
    model = tiny_model()
    round_weights(model)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_adapter_keys_and_shapes_are_those_of_a_plain_model(packed, dense):
    of_packed, of_dense = (peft.get_peft_model_state_dict(add_lora(model)) for model in (packed, dense))
    assert len(of_dense) == 2 * 7 * 2
    assert [(name, tensor.shape, tensor.dtype) for name, tensor in of_packed.items()] == [
        (name, tensor.shape, tensor.dtype) for name, tensor in of_dense.items()
    ]


def test_all_keys_are_those_of_a_plain_model_but_for_the_packed_weights(packed, dense):
    of_packed, of_dense = (set(add_lora(model).state_dict()) for model in (packed, dense))
    left_out = of_dense - of_packed
    assert not of_packed - of_dense
    assert len(left_out) == 2 * 7
    assert all(name.endswith("_proj.base_layer.weight") for name in left_out)


def test_without_an_adapter_both_models_are_equal(packed, dense):
    assert torch.equal(logits(packed), logits(dense))


def test_b_of_zero_is_the_base(packed):
    base = logits(packed)
    assert torch.equal(logits(add_lora(packed)), base)


def test_an_adapter_acts_as_on_a_plain_model(packed, dense):
    base = logits(packed)
    of_packed, of_dense = (logits(add_lora(model, trained=True)) for model in (packed, dense))
    assert not torch.equal(of_packed, base)
    assert torch.equal(of_packed, of_dense)


def test_a_disabled_adapter_is_the_base(packed):
    base = logits(packed)
    model = add_lora(packed, trained=True)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert not torch.equal(logits(model), base)


def test_only_adapters_learn_and_as_on_a_plain_model(packed, dense):
    grads = []
    for model in (packed, dense):
        model = add_lora(model, trained=True)
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(grads[0]) == 28
    assert all("lora_" in name for name in grads[0])
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_a_saved_adapter_loads_into_a_plain_model(packed, dense, tmp_path):
    model = add_lora(packed, trained=True)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(dense, tmp_path)), logits(model))


def test_merging_is_refused_and_changes_nothing(packed):
    base = logits(packed)
    model = add_lora(packed, trained=True)
    with pytest.raises(RuntimeError):
        model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_gradient_checkpointing_gives_the_same_gradients(packed):
    grads = []
    model = add_lora(packed, trained=True).train()
    model.enable_input_require_grads()
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 28
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
