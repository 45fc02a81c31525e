"""Norm and activation with X A^T, in an emulated GPU: elementwise.cu's rows, and what low_rank.cu makes of them."""

import pytest
import torch

from verl_qerl.kernels import elementwise
from verl_qerl.kernels.elementwise_low import add_rms_norm_low, can_make_low, recall, silu_mul_low
from verl_qerl.kernels.low_rank import low_rank

SCALE = torch.full((1,), 2.0**-11)  # times 256: an eighth
# Rows, K, columns of A: parts of unequal length, and of none; slices of K from 16 to 2; a tile of columns too many.
CASES = [(1, 64, 8), (16, 576, 24), (70, 832, 96), (33, 320, 32), (17, 1024, 384), (40, 2304, 56), (20, 5120, 64)]


def assert_low(low, y, a, slots):
    expected = y.double() @ a.double().T * (slots[: len(y), None] >= 0)
    error = (low.double() / 8 - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()
    other = low_rank(y, a, slots, SCALE)
    assert (low != other).float().mean() < 0.01  # sums in another order


def inputs(rows, K, columns):
    generator = torch.Generator().manual_seed(rows * K)
    x, residual = (torch.randn(rows, K, generator=generator).bfloat16() for _ in range(2))
    a = (torch.randn(columns, K, generator=generator) * K**-0.5).bfloat16()
    return x, residual, a, torch.arange(rows + 2) % 3 - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "K", "columns"), CASES, ids=str)
def test_the_norm(gpu, rows, K, columns, dtype):
    x, residual, a, slots = inputs(rows, K, columns)
    weight = torch.linspace(0.5, 1.5, K).to(dtype)
    assert can_make_low(K, columns)
    made = []
    for _ in range(3):
        y, total = add_rms_norm_low(x, residual, weight, 1e-6, a, slots, SCALE)
        made.append((y, total, recall(y, a)))
    y, total, low = made[0]
    expected, expected_total = elementwise._launch_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert (y == expected).float().mean() > 0.99  # float32 sums differ
    # A step of the normalized row, times a weight in bf16, can be two of the result.
    assert ((y.double() - expected.double()).abs() <= 2**-6 * expected.double().abs()).all()
    assert_low(low, y, a, slots)
    assert all(torch.equal(one, other) for again in made for one, other in zip(made[0], again, strict=True))


@pytest.mark.parametrize(("rows", "K", "columns"), CASES, ids=str)
def test_the_activation(gpu, rows, K, columns):
    x, other, a, slots = inputs(rows, K, columns)
    pair = 4 * torch.cat((x, other), dim=1)
    made = []
    for _ in range(3):
        y = silu_mul_low(pair, a, slots, SCALE)
        made.append((y, recall(y, a)))
    y, low = made[0]
    assert torch.equal(y, elementwise._silu_mul_cuda(pair))
    assert_low(low, y, a, slots)
    assert all(torch.equal(one, other) for again in made for one, other in zip(made[0], again, strict=True))


SYNC = "  cluster_sync();\n"
CHANGES = {
    "squares of others are read before they are there": (
        f"squares_of[warp] = squares;\n{SYNC}",
        "squares_of[warp] = squares;\n",
    ),
    "sums of others are read before they are there": (
        f"{SYNC}  const int rank",
        "  __syncthreads();\n  const int rank",
    ),
    "a block leaves while others read its sums": ("  cluster_sync();  // no block leaves", "  // no block leaves"),
    "sums take the place of rows in use": ("  __syncthreads();  // y is read no more\n", ""),
    "rows are multiplied before all are there": ("  __syncthreads();\n  multiply_by_a", "  multiply_by_a"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_synchronization_that_is_taken_out_is_missed(gpu, mutate, change):
    x, residual, a, slots = inputs(20, 576, 24)
    weight = torch.ones(576)

    def run():
        y, total = add_rms_norm_low(x, residual, weight, 1e-6, a, slots, SCALE)
        return y, total, recall(y, a)

    expected = run()

    def is_right():
        try:
            return all(torch.equal(*pair) for pair in zip(expected, run(), strict=True))
        except RuntimeError:
            return False

    assert all(is_right() for _ in range(4))
    mutate(CHANGES[change])
    assert not all(is_right() for _ in range(8))
    assert all(mutate.found.values())


def test_what_is_made_is_for_one_linear_and_once(gpu):
    x, residual, a, slots = inputs(3, 64, 8)
    weight = torch.ones(64)
    y, _ = add_rms_norm_low(x, residual, weight, 1e-6, a, slots, SCALE)
    assert recall(y, a.clone()) is None
    assert recall(y, a) is None  # it was let go
    y, total = add_rms_norm_low(x, residual, weight, 1e-6, a, slots, SCALE)
    assert recall(total, a) is None
    y, _ = add_rms_norm_low(x, residual, weight, 1e-6, a, slots, SCALE)
    other = silu_mul_low(torch.cat((x, x), 1), a, slots, SCALE)
    assert recall(y, a) is None
    other = silu_mul_low(torch.cat((x, x), 1), a, slots, SCALE)
    assert recall(other, a).shape == (3, 8)


def test_what_can_be_made():
    assert can_make_low(3584, 96)
    assert can_make_low(29568, 128)
    assert not can_make_low(96, 8)  # half a chunk of a step of the matmul
    assert not can_make_low(64, 0)
    assert not can_make_low(64, 12)
    assert not can_make_low(64, 1024)
    assert not can_make_low(65536, 96)  # more rows than shared memory holds
