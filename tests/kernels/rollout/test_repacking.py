"""The tiled layout on a GPU: decoded bit for bit."""

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.formats import reference
from verl_qerl.kernels.rollout.repacking import decode, repack

pytestmark = pytest.mark.gpu

SHAPES = [(64, 16), (128, 144), (4608, 3584), (3584, 18944)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_bit_for_bit(shape):
    weight = random_packed_weight(*shape, device="cuda")
    tiles = repack(weight)
    torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")  # the block that the output is given
    out = decode(*tiles)
    expected = reference.dequantize(weight, torch.bfloat16)
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize(("start", "end"), [(0, 3584), (3584, 4096), (4096, 4608)], ids=str)
def test_decodes_rows_in_place(start, end):
    weight = random_packed_weight(4608, 3584, device="cuda")  # q, k and v of 7B
    words, scale, decode_scale = repack(weight)
    out = decode(words[:, 2 * start : 2 * end], scale[:, start:end], decode_scale)
    assert torch.equal(out, reference.dequantize(weight, torch.bfloat16)[start:end])
