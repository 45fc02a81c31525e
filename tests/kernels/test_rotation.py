"""Rotation, and norms of heads before it, on a GPU, against what the operators do on a CPU."""

import pytest
import torch

from verl_qerl.kernels.rotation import norm_rotate, rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROWS = [1, 7, 32, 128, 300, 4096]
HEADS = [(128, 28, 4), (128, 32, 8), (128, 40, 8), (64, 14, 2), (256, 1, 1), (16, 3, 1), (512, 2, 1)]


def build(rows: int, size: int, q_heads: int, k_heads: int) -> tuple[torch.Tensor, ...]:
    """q and k as slices of a fused linear's output, positions, table; on the GPU."""
    generator = torch.Generator().manual_seed(rows)
    whole = torch.randn(rows, (q_heads + 2 * k_heads) * size, generator=generator).bfloat16().cuda()
    q, k, _ = whole.split([q_heads * size, k_heads * size, k_heads * size], 1)
    positions = torch.randint(0, 4096, (rows,), generator=generator).cuda()
    return q, k, positions, torch.randn(4096, size, generator=generator).bfloat16().cuda()


def poison(*shape: int) -> None:
    """The next output of this size comes from memory full of NaN."""
    torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("size", "q_heads", "k_heads"), HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_the_rotation_is_that_of_a_cpu(rows, size, q_heads, k_heads):
    q, k, positions, table = build(rows, size, q_heads, k_heads)
    poison(rows, q_heads * size)
    found = rotate(q, k, positions, table, size)
    expected = rotate(q.cpu(), k.cpu(), positions.cpu(), table.cpu(), size)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "q_heads", "k_heads"), HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_norms_of_heads_are_those_of_a_cpu(rows, size, q_heads, k_heads, dtype):
    q, k, positions, table = build(rows, size, q_heads, k_heads)
    weights = [1 + 0.1 * torch.randn(size, device="cuda").to(dtype) for _ in range(2)]
    poison(rows, q_heads * size)
    found = norm_rotate(q, k, *weights, 1e-6, positions, table, size)
    again = norm_rotate(q, k, *weights, 1e-6, positions, table, size)
    expected = norm_rotate(*(x.cpu() for x in (q, k, *weights)), 1e-6, positions.cpu(), table.cpu(), size)
    # Of the values that go into a result: a neighbour of the normalized one in bf16, where float32 sums differ.
    largest = float(table.abs().max()) * 2 * float(max(x.float().abs().max() for x in (q, k)))
    for mine, same, theirs in zip(found, again, expected, strict=True):
        assert torch.equal(mine, same)
        assert (mine.cpu().float() - theirs.float()).abs().max() <= 2**-6 * largest
        assert (mine.cpu() == theirs).float().mean() > 0.99
