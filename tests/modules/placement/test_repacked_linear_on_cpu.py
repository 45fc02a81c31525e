import copy

import pytest
import torch
import torch.nn as nn
from qerl_testing import random_packed_weight

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.rollout.repacking import repack
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.repacked_linear import RepackedNVFP4Linear


def build(start: int = 64, end: int = 192, K: int = 48, bias: bool = True):
    """(an NVFP4Linear, the same over rows `start` to `end` of the tiles of a larger weight)."""
    torch.manual_seed(0)
    stack = random_packed_weight(256, K)
    plain = NVFP4Linear.from_linear(nn.Linear(K, end - start, bias=bias, dtype=torch.bfloat16))
    plain.fill(nvfp4_weight(stack.codes[start:end], stack.block_scale[start:end], stack.global_decode_scale))
    words, scale, decode_scale = repack(stack)
    tiled = copy.deepcopy(plain)
    RepackedNVFP4Linear.hold(tiled, (words[:, 2 * start : 2 * end], scale[:, start:end], decode_scale))
    return plain, tiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_passes_are_those_of_the_other_layout_bit_for_bit(dtype, bias):
    found = []
    for linear in build(bias=bias):
        x = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = linear(x)
        y.square().sum().backward()
        assert y.dtype == dtype
        found.append((linear.decode(dtype), y.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast():
    plain, tiled = build()
    x = torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        assert torch.equal(tiled(x), expected)


def test_the_weight_comes_out_as_it_was_filled_in():
    plain, tiled = build()
    assert weight_digest(tiled.packed()) == weight_digest(plain.packed())
    assert tiled.packed().global_decode_scale.shape == ()


def test_it_holds_no_bytes_of_its_own_and_nothing_moves_the_tiles():
    _, tiled = build()
    words = tiled.tiles[0]
    assert [buffer.numel() for buffer in tiled.buffers()] == [0, 0, 0]
    assert isinstance(tiled, NVFP4Linear)
    tiled.to(torch.float64).to("meta")
    assert tiled.tiles[0] is words
    assert set(tiled.state_dict()) == {"bias"}


def test_it_cannot_be_filled():
    plain, tiled = build()
    with pytest.raises(RuntimeError, match="a shared base cannot be filled again"):
        tiled.fill(plain.packed())
