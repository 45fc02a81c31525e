"""The module alone, not sharded yet; with FSDP2: test_nvfp4_linear_fsdp2_on_cpu.py."""

import copy

import pytest
import torch
import torch.nn as nn
from qerl_testing import random_packed_weight

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.manifest import checksum
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.sharded_linear import PackedBytes, ShardedNVFP4Linear

SHAPES = [(24, 48), (1, 16), (7, 80)]


def build(N: int = 24, K: int = 48, bias: bool = True):
    """(module, its weight, an NVFP4Linear of the same values)."""
    torch.manual_seed(0)
    dense, weight = nn.Linear(K, N, bias=bias, dtype=torch.bfloat16), random_packed_weight(N, K)
    modules = [kind.from_linear(dense) for kind in (ShardedNVFP4Linear, NVFP4Linear)]
    for module in modules:
        module.fill(weight)
    return modules[0], weight, modules[1]


def same_bits(a, b) -> bool:
    return weight_digest(a) == weight_digest(b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_computes_as_the_module_that_is_not_sharded(shape):
    module, weight, other = build(*shape)
    x = torch.randn(3, shape[1]).bfloat16()
    assert torch.equal(module(x), other(x))
    assert torch.equal(module.decode(torch.float32), other.decode(torch.float32))
    assert same_bits(module.packed(), weight)
    assert [t.shape for t in module.tensors()] == [t.shape for t in other.tensors()]


def test_codes_and_scales_start_where_a_kernel_can_load_them():
    module, _, _ = build(64, 128)
    start = module.packed_bytes.data_ptr()
    codes, scale, _ = module.tensors()
    assert (codes.data_ptr() - start) % 16 == 0
    assert (scale.data_ptr() - start) % 16 == 0


def test_one_frozen_parameter_beside_the_bias():
    module, _, _ = build()
    assert {name: (p.dtype, p.requires_grad) for name, p in module.named_parameters()} == {
        "bias": (torch.bfloat16, False),
        "packed_bytes": (torch.bfloat16, False),
    }
    assert list(module.buffers()) == []


def test_fsdp_is_given_bytes():
    module, _, _ = build()
    part = module.packed_bytes.detach()[:8]
    assert type(part) is PackedBytes
    (given,), _ = part.fsdp_pre_all_gather(None)
    assert (type(given), given.dtype, given.numel()) == (torch.Tensor, torch.uint8, 16)


def test_other_bits_than_those_that_were_gathered_before_are_noticed_once():
    module, _, other = build()
    x = torch.randn(3, 48).bfloat16()
    module._checksum = checksum(module.packed_bytes.view(torch.uint8))
    module.packed_bytes.view(torch.uint8)[-1] ^= 1
    with pytest.raises(RuntimeError, match=r"^the packed bytes of a linear that FSDP2 gathered for a pass"):
        module(x)
    module.packed_bytes.view(torch.uint8)[-1] ^= 1
    assert torch.equal(module(x), other(x))
    assert module._checksum is None


def test_what_is_gathered_lies_under_the_parameter():
    module, _, _ = build()
    gathered = torch.arange(64, dtype=torch.uint8)
    parameter, freed = module.packed_bytes.fsdp_post_all_gather((gathered,), None, torch.bfloat16)
    assert (parameter.dtype, parameter.data_ptr(), freed) == (torch.bfloat16, gathered.data_ptr(), ())
    assert module.packed_bytes.fsdp_post_all_gather((gathered,), None, torch.bfloat16, out=parameter) is None
    with pytest.raises(RuntimeError, match=r"^the gathered bytes are not those of the parameter\."):
        module.packed_bytes.fsdp_post_all_gather((gathered.clone(),), None, torch.bfloat16, out=parameter)


CONVERSIONS = [nn.Module.half, nn.Module.float, nn.Module.double, lambda module: module.to("cpu", torch.float16)]


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["half", "float", "double", "to"])
def test_no_change_of_dtype_reaches_the_bits(convert):
    module, weight, _ = build()
    convert(module)
    assert module.bias.dtype != torch.bfloat16
    assert same_bits(module.packed(), weight)


def test_a_copy_and_a_state_keep_the_bits():
    module, weight, _ = build()
    other = ShardedNVFP4Linear.from_linear(nn.Linear(48, 24, dtype=torch.bfloat16))
    other.load_state_dict(module.state_dict())
    for copied in (copy.deepcopy(module), other):
        assert same_bits(copied.packed(), weight)
        assert type(copied.packed_bytes.detach()) is PackedBytes
        assert copied.packed_bytes.data_ptr() != module.packed_bytes.data_ptr()


def test_a_base_that_is_not_persistent_is_neither_saved_nor_missed():
    module, weight, _ = build()
    module.persistent = False
    assert list(module.state_dict()) == ["bias"]
    module.load_state_dict({"bias": torch.zeros(24)})
    assert same_bits(module.packed(), weight)
    with pytest.raises(RuntimeError, match="bias"):
        module.load_state_dict({})


def test_leaves_the_meta_device():
    module = ShardedNVFP4Linear.from_linear(nn.Linear(48, 24, bias=False, device="meta"))
    assert module.packed_bytes.is_meta
    weight = random_packed_weight(24, 48)
    module.fill(weight)
    assert same_bits(module.packed(), weight)
    empty = ShardedNVFP4Linear.from_linear(nn.Linear(48, 24, bias=False, device="meta")).to_empty(device="cpu")
    assert (empty.packed_bytes.device.type, empty.packed_bytes.numel()) == ("cpu", module.packed_bytes.numel())
