"""A model of linears in each format under PEFT, against the model of the dense values."""

import copy

import pytest
import torch
import torch.nn as nn
from qerl_testing import draw_adapter, rms_error_ratio
from torch.utils.checkpoint import checkpoint

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats import get_format
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.convert import packed_weights, replace_linears
from verl_qerl.modules.format_linear import PACKED_LINEARS, INT8Linear

peft = pytest.importorskip("peft")
from verl_qerl.modules.adapted_linear import AdaptedLinear, fuse_adapters  # noqa: E402

IDS = torch.arange(24).reshape(2, 12)
SIBLINGS = ("fp8", "int8", "mxfp4")


def is_decoder_linear(name: str) -> bool:
    return ".layers." in name and "down_proj" not in name  # its 48 inputs are no multiple of 32


def models(tiny_model, name):
    """(packed, dense) with the same values, both with the same adapters."""
    form, dense = get_format(name), tiny_model()
    packed = copy.deepcopy(dense)
    for key, linear in replace_linears(packed, is_decoder_linear, PACKED_LINEARS[name]).items():
        weight = form.quantize(dense.get_submodule(key).weight.detach())
        linear.fill(weight)
        dense.get_submodule(key).weight.data = dequantize(weight)
    return adapt(packed), adapt(dense)


def adapt(model):
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    draw_adapter(model, seed=0, dtype=torch.bfloat16)
    return model


def run(model) -> dict[str, torch.Tensor]:
    """Logits and gradients."""
    logits = model(input_ids=IDS).logits
    logits.float().logsumexp(-1).sum().backward()
    return {"logits": logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fused", [False, True], ids=["peft", "fused"])
@pytest.mark.parametrize("name", SIBLINGS)
def test_logits_and_gradients_are_those_of_the_dense_values(tiny_model, name, fused):
    pair = models(tiny_model, name)
    kinds = [type(module).__name__ for module in pair[0].modules()]
    assert kinds.count(PACKED_LINEARS[name].__name__) == 12
    if fused:
        assert [fuse_adapters(model) for model in pair] == [14, 14]
        assert sum(isinstance(module, AdaptedLinear) for module in pair[0].modules()) == 14
    found, expected = map(run, pair)
    assert found.keys() == expected.keys()
    assert len(found) == 1 + 28
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_a_recomputed_layer_decodes_once_for_both_passes(tiny_model, monkeypatch):
    model, _ = models(tiny_model, "int8")
    fuse_adapters(model)
    count = []
    decode = INT8Linear.decode
    monkeypatch.setattr(INT8Linear, "decode", lambda self, dtype: count.append(self) or decode(self, dtype))
    layer = model.base_model.model.model.layers[0].mlp
    x = torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(count) == 2 * 2  # gate and up: one forward, and one for recomputation and backward


@pytest.mark.parametrize("name", SIBLINGS)
def test_packed_weights_have_the_names_of_the_checkpoint(tiny_model, name):
    model, _ = models(tiny_model, name)
    found = {key: weight_digest(weight) for key, weight in packed_weights(model)}
    assert len(found) == 12
    assert all(key.startswith("model.layers.") for key in found)


@pytest.mark.parametrize(("name", "bound"), [("fp8", 2.3e-3), ("int8", 2.3e-3), ("mxfp4", 0)])
def test_rounding_codes_times_scale_costs_as_much_as_rounding_the_result_once(name, bound):
    # A kernel of the rollout multiplies by codes, and the sum by the scale; here codes times scale are rounded to bf16.
    # One such rounding moves a number by at most 2**-8 of it, in RMS by at most 2**-8 / sqrt(3). Measured: 1.6e-3.
    generator = torch.Generator().manual_seed(0)
    form = get_format(name)
    packed = form.quantize(torch.randn(64, 1024, generator=generator) * 0.02)
    linear = PACKED_LINEARS[name].from_linear(nn.Linear(1024, 64, bias=False, device="meta"))
    linear.fill(packed)
    x = torch.randn(32, 1024, generator=generator).double()
    exact = x @ dequantize(packed, torch.float64).t()
    found = rms_error_ratio(x @ linear.decode(torch.bfloat16).double().t(), exact)
    assert bound / 3 <= found <= bound
    assert rms_error_ratio(exact.bfloat16(), exact) > 0.6 * found
