"""Rotation, and norms of heads before it, on a GPU, against what the operators do on a CPU."""

import pytest
import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout.rotation import rotate

pytestmark = pytest.mark.gpu
cases = load_beside(__file__, "rotation_cases")
poison = load_beside(__file__, "unwritten").poison

ROWS = [1, 7, 32, 128, 300, 4096]
HEADS = [(128, 28, 4), (128, 32, 8), (128, 40, 8), (64, 14, 2), (256, 1, 1), (16, 3, 1), (512, 2, 1)]


@pytest.mark.parametrize(("size", "q_heads", "k_heads"), HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_the_rotation_is_that_of_a_cpu(rows, size, q_heads, k_heads):
    q, k, positions, table = cases.heads(rows, size, q_heads, k_heads, 4096, "cuda")
    poison(rows, q_heads * size)
    found = rotate(q, k, positions, table, size)
    expected = rotate(q.cpu(), k.cpu(), positions.cpu(), table.cpu(), size)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "q_heads", "k_heads"), HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_norms_of_heads_are_those_of_a_cpu(rows, size, q_heads, k_heads, dtype):
    q, k, positions, table = cases.heads(rows, size, q_heads, k_heads, 4096, "cuda")
    weights = cases.head_norms(size, dtype, "cuda")
    poison(rows, q_heads * size)
    found = rotate(q, k, positions, table, size, *weights, 1e-6)
    again = rotate(q, k, positions, table, size, *weights, 1e-6)
    expected = rotate(*(x.cpu() for x in (q, k, positions, table)), size, *(x.cpu() for x in weights), 1e-6)
    # Of the values that go into a result: a neighbour of the normalized one in bf16, where float32 sums differ.
    largest = float(table.abs().max()) * 2 * float(max(x.float().abs().max() for x in (q, k)))
    for mine, same, theirs in zip(found, again, expected, strict=True):
        assert torch.equal(mine, same)
        assert (mine.cpu().float() - theirs.float()).abs().max() <= 2**-6 * largest
        assert (mine.cpu() == theirs).float().mean() > 0.99
