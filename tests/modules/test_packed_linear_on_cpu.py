"""What all packed linears have in common, in every format."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats import get_format
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.format_linear import PACKED_LINEARS

FORMS = sorted(PACKED_LINEARS)
each_format = pytest.mark.parametrize("name", FORMS)


def build(name, N=24, K=64, bias=True, dtype=torch.bfloat16, seed=0):
    """(packed, its weight, the dense linear of the same values)."""
    torch.manual_seed(seed)
    dense = nn.Linear(K, N, bias=bias, dtype=dtype)
    form = get_format(name)
    weight = form.quantize(torch.randn(N, K) * 0.02)
    packed = PACKED_LINEARS[name].from_linear(dense)
    packed.fill(weight)
    with torch.no_grad():
        dense.weight.copy_(dequantize(weight, dtype))
    return packed, weight, dense


@each_format
def test_what_was_filled_in_comes_out_without_a_copy(name):
    packed, weight, _ = build(name)
    assert weight_digest(packed.packed()) == weight_digest(weight)
    assert [buffer.data_ptr() for buffer in packed.tensors()] == [tensor.data_ptr() for tensor in weight.tensors]
    assert {buffer.dtype for buffer in packed.buffers()} == {torch.uint8}
    held = sum(buffer.numel() for buffer in packed.buffers())
    assert held == weight.size_bytes


@each_format
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_forward_and_gradient_are_the_dense_linears(name, dtype, bias):
    packed, _, dense = build(name, bias=bias, dtype=dtype)
    outputs = []
    for module in (packed, dense):
        x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        outputs.append((y.detach(), x.grad))
    assert all(torch.equal(found, expected) for found, expected in zip(*outputs, strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in packed.parameters())


@each_format
def test_autocast_decides_the_dtype(name, monkeypatch):
    packed, _, dense = build(name, dtype=torch.float32)
    kind, decoded_to = type(packed), []
    decode = kind.decode
    monkeypatch.setattr(kind, "decode", lambda self, dtype: decoded_to.append(dtype) or decode(self, dtype))
    outputs = []
    for module in (packed, dense):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        y.square().sum().backward()
        outputs.append((y.detach(), x.grad))
    assert all(torch.equal(found, expected) for found, expected in zip(*outputs, strict=True))
    # Not a float32 weight that autocast would then copy to bf16.
    assert decoded_to == [torch.bfloat16, torch.bfloat16]
    assert packed(x).dtype == torch.float32


@each_format
def test_a_bias_of_another_dtype_follows_the_input(name):
    packed, weight, _ = build(name, dtype=torch.float32)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(packed(x), F.linear(x, dequantize(weight), packed.bias.bfloat16()))


@each_format
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double], ids=lambda f: f.__name__)
def test_no_change_of_dtype_copy_or_state_dict_reaches_the_bits(name, convert):
    packed, weight, _ = build(name)
    other = copy.deepcopy(convert(packed))
    other.load_state_dict(packed.state_dict())
    assert weight_digest(other.packed()) == weight_digest(weight)
    assert other.weight.data_ptr() != packed.weight.data_ptr()
    assert [key for key, _ in packed.named_parameters()] == list(packed.state_dict()) == ["bias"]


@each_format
def test_an_unfilled_module_has_weight_zero_and_may_be_on_meta(name):
    dense = nn.Linear(64, 8)
    assert torch.equal(PACKED_LINEARS[name].from_linear(dense)(torch.randn(2, 64)), dense.bias.expand(2, 8))
    packed = PACKED_LINEARS[name].from_linear(nn.Linear(64, 24, bias=False, device="meta"))
    assert all(buffer.is_meta for buffer in packed.buffers())
    packed.fill(build(name)[1])
    assert not any(buffer.is_meta for buffer in packed.buffers())


@each_format
def test_the_module_says_what_it_is(name):
    packed, _, _ = build(name)
    assert isinstance(packed, nn.Linear)
    kind = type(packed).__name__
    assert repr(packed) == f"{kind}(in_features=64, out_features=24, bias=True, {name})"


@pytest.mark.parametrize(("name", "K", "block"), [("mxfp4", 48, 32), ("nvfp4", 24, 16)])
def test_in_features_that_the_format_cannot_hold(name, K, block):
    with pytest.raises(
        ValueError, match=rf"^in_features={K} of 'linear' is not a multiple of {block}\. {name.upper()} cannot"
    ):
        PACKED_LINEARS[name].from_linear(nn.Linear(K, 8))


@each_format
def test_no_weight_is_saved_for_backward(name):
    """It stays where it is; verl's activation offload would move what is saved to the host and back."""
    packed, saved = build(name)[0], []
    x = torch.randn(5, 64, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda tensor: tensor):
        assert packed(x).requires_grad
    assert not saved
