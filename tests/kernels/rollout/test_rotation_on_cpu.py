"""Rotation, and norms of heads, on a CPU: the bits of transformers, and what compilers are told of their shapes."""

import pytest
import torch
from qerl_testing import load_beside
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from verl_qerl.kernels.rollout import rotation
from verl_qerl.kernels.rollout.rotation import can_normalize_heads, can_rotate, rotate

cases = load_beside(__file__, "rotation_cases")
heads, head_norms = cases.heads, cases.head_norms


@pytest.mark.parametrize("size", [16, 64, 128])
def test_the_rotation_is_that_of_transformers(size):
    q, k, positions, table = heads(5, size)
    cosine, sine = (torch.cat((part, part), -1)[positions][None] for part in table.chunk(2, 1))
    turned = apply_rotary_pos_emb(*(x.view(1, 5, -1, size).transpose(1, 2) for x in (q, k)), cosine, sine)
    for found, expected in zip(rotate(q, k, positions, table, size), turned, strict=True):
        assert torch.equal(found, expected.transpose(1, 2).reshape(5, -1))


def test_what_can_be_rotated():
    q, k, positions, table = heads(5, 64)
    assert can_rotate(q, k, positions, table, 64)
    assert not can_rotate(q, k, positions, table, 128)  # a part of each head
    assert not can_rotate(q, k, positions.int(), table, 64)
    assert not can_rotate(q, k, positions.expand(3, -1), table, 64)  # those of images and text
    assert not can_rotate(q.half(), k.half(), positions, table.half(), 64)
    assert not can_rotate(q, k, positions, table[:, :40], 40)
    assert not can_rotate(q, k, positions, torch.randn(40, 96).bfloat16(), 96)


def test_compilers_know_the_shapes_of_the_rotation():
    torch.library.opcheck(rotate, (*heads(4, 32), 32))


@torch.no_grad()
@pytest.mark.parametrize("size", [16, 128])
def test_norms_come_before_the_rotation_as_in_transformers(size):
    q, k, positions, table = heads(5, size)
    weights = head_norms(size)
    normalized = []
    for x, weight in zip((q, k), weights, strict=True):
        norm = Qwen3RMSNorm(size, eps=1e-5)
        norm.weight.data = weight
        normalized.append(norm(x.reshape(5, -1, size)).reshape(5, -1))
    expected = rotate(*normalized, positions, table, size)
    found = rotate(q, k, positions, table, size, *weights, 1e-5)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_whose_heads_can_be_normalized():
    q, k = head_norms(128)
    assert can_normalize_heads(q, k)
    assert can_normalize_heads(q.float(), k.float())
    assert not can_normalize_heads(q, k.float())
    assert not can_normalize_heads(q, k[:64])
    assert not can_normalize_heads(*head_norms(1024))
    assert not can_normalize_heads(q.half(), k.half())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_a_launch_has_a_block_for_each_token(monkeypatch, dtype):
    launched = []
    monkeypatch.setattr(rotation, "_kernel", lambda norms: lambda *given: launched.append((norms, *given)))
    q, k, positions, table = heads(5, 64)
    if dtype is None:
        rotation._launch(q, k, None, 0.0, positions, table, 64)
    else:
        weights = head_norms(64, dtype)
        rotation._launch(q, k, weights, 1e-5, positions, table, 64)
    ((norms, grid, threads, args),) = launched
    assert (norms, grid, threads) == (dtype, 5, 256)
    assert args[6:11] == [4, 3, 2, 7 * 8, 7 * 8]  # chunks of half a head, heads, chunks from a token to the next
    assert args[0].data_ptr() == q.data_ptr()
    if dtype is not None:
        assert all(given is weight for given, weight in zip(args[11:13], weights, strict=True))
        assert args[13].value == pytest.approx(1e-5)


def test_compilers_know_the_shapes_of_norms_and_rotation():
    q, k, positions, table = heads(4, 32)
    torch.library.opcheck(rotate, (q, k, positions, table, 32, *head_norms(32), 1e-5))
