import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from qerl_testing import quantize, random_packed_weight

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules import nvfp4_linear
from verl_qerl.modules.nvfp4_linear import NVFP4Linear


def build(N: int = 24, K: int = 48, bias: bool = True, dtype: torch.dtype = torch.bfloat16):
    """(packed, its weight, the dense linear of the same values)."""
    torch.manual_seed(0)
    dense = nn.Linear(K, N, bias=bias, dtype=dtype)
    weight = random_packed_weight(N, K)
    packed = NVFP4Linear.from_linear(dense)
    packed.fill(weight)
    with torch.no_grad():
        dense.weight.copy_(dequantize(weight, dtype))
    return packed, weight, dense


def same_bits(a, b) -> bool:
    return weight_digest(a) == weight_digest(b)


def test_what_was_filled_in_comes_out():
    packed, weight, _ = build()
    found = packed.packed()
    assert same_bits(found, weight)
    assert found.global_decode_scale.shape == ()
    assert found.codes.data_ptr() == weight.codes.data_ptr()
    assert packed.weight_decode_scale.shape == (4,)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_forward_is_the_dense_linear_of_the_same_values(dtype, bias):
    packed, _, dense = build(bias=bias, dtype=dtype)
    x = torch.randn(2, 3, 48).to(dtype)
    assert torch.equal(packed(x), dense(x))


def test_gradients_reach_the_input_alone():
    packed, _, dense = build(dtype=torch.float32)
    x = torch.randn(5, 48, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    packed(x).square().sum().backward()
    dense(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in packed.parameters())


def test_autocast_decides_the_dtype(monkeypatch):
    packed, _, dense = build(dtype=torch.float32)
    operator, decoded_to = nvfp4_linear.dequantize_nvfp4, []
    monkeypatch.setattr(nvfp4_linear, "dequantize_nvfp4", lambda *args: decoded_to.append(args[-1]) or operator(*args))
    grads = []
    for module in (packed, dense):
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        y.square().sum().backward()
        grads.append((y.detach(), x.grad))
    assert all(torch.equal(found, expected) for found, expected in zip(*grads, strict=True))
    # Not a float32 weight that autocast would then copy to bf16.
    assert decoded_to == [torch.bfloat16, torch.bfloat16]
    assert packed(x).dtype == torch.float32


def test_an_unfilled_module_has_weight_zero():
    dense = nn.Linear(32, 8)
    packed = NVFP4Linear.from_linear(dense)
    assert torch.equal(packed(torch.randn(2, 32)), dense.bias.expand(2, 8))


def test_holds_nine_bytes_for_sixteen_weights_and_no_more():
    packed = NVFP4Linear.from_linear(nn.Linear(64, 128, bias=False))
    tensors = [*packed.parameters(), *packed.buffers()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 64 * 128 * 9 // 16 + 4


def test_only_the_bias_is_a_parameter_and_in_checkpoints():
    packed, weight, _ = build()
    packed.fill(weight)
    assert [name for name, _ in packed.named_parameters()] == ["bias"]
    assert list(packed.state_dict()) == ["bias"]
    assert {name for name, _ in packed.named_buffers()} == {"weight", "weight_scale", "weight_decode_scale"}


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double], ids=lambda f: f.__name__)
def test_no_change_of_dtype_reaches_the_bits(convert):
    packed, weight, _ = build()
    convert(packed)
    assert same_bits(packed.packed(), weight)


def test_deepcopy_and_loading_a_state_dict_keep_the_bits():
    packed, weight, _ = build()
    other = copy.deepcopy(packed)
    other.load_state_dict(packed.state_dict())
    assert same_bits(other.packed(), weight)
    assert other.weight.data_ptr() != packed.weight.data_ptr()


def test_takes_its_place_on_the_meta_device_and_leaves_it():
    packed = NVFP4Linear.from_linear(nn.Linear(48, 24, bias=False, device="meta"))
    assert all(buffer.is_meta for buffer in packed.buffers())
    packed.fill(random_packed_weight(24, 48))
    assert not any(buffer.is_meta for buffer in packed.buffers())


def test_is_a_linear_to_others():
    packed, _, _ = build()
    assert isinstance(packed, nn.Linear)
    assert (packed.in_features, packed.out_features) == (48, 24)
    assert repr(packed) == "NVFP4Linear(in_features=48, out_features=24, bias=True, nvfp4)"


@pytest.mark.parametrize("shape", [(24, 32), (48, 48), (48, 24)], ids=str)
def test_a_weight_of_another_shape(shape):
    packed = NVFP4Linear.from_linear(nn.Linear(48, 24))
    N, K = shape
    weight = quantize(torch.ones(N, -(-K // 16) * 16))
    with pytest.raises(ValueError, match=r"^the packed weight is .* the linear \(24, 48\)\. .* config\.json"):
        packed.fill(weight)
    assert torch.count_nonzero(packed.weight) == 0


def test_under_torch_compile():
    packed, _, _ = build()
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), packed(x))


def test_a_bias_of_another_dtype_follows_the_input():
    packed, weight, _ = build(dtype=torch.float32)
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    assert torch.equal(packed(x), F.linear(x, dequantize(weight), packed.bias.bfloat16()))
