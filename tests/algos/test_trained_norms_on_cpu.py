import pytest

from verl_qerl.algos.trained_norms import shifted_norm, split_norms

NORM = "model.layers.0.input_layernorm"


@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.{NORM}.modules_to_save.default.adapter_shift",  # in the state of a model
        f"base_model.model.{NORM}.adapter_shift",  # as PEFT saves it
        f"{NORM}.adapter_shift",
    ],
)
def test_a_shift_names_its_norm(name):
    assert shifted_norm(name) == NORM


@pytest.mark.parametrize(
    "name", [f"{NORM}.weight", f"{NORM}.original_module.weight", "model.layers.0.q_proj.lora_A.weight", "adapter_shift"]
)
def test_other_tensors_shift_nothing(name):
    assert shifted_norm(name) is None


def test_split_keeps_order_and_values():
    adapter, norms = split_norms({"b.lora_A.weight": 1, f"{NORM}.adapter_shift": 2, "a.lora_A.weight": 3})
    assert list(adapter.items()) == [("b.lora_A.weight", 1), ("a.lora_A.weight", 3)]
    assert norms == {NORM: 2}
