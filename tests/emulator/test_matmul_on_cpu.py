"""The matmul and the low rank in an emulated GPU, against float64: results do not depend on the order of threads."""

import pytest
import torch

from verl_qerl.kernels.rollout.low_rank import low_rank
from verl_qerl.kernels.rollout.w4a16_launch import EACH, STREAM_K, TOKENS, Launch, padded_rows
from verl_qerl.kernels.rollout.w4a16_matmul import _own_rows, can_fuse, w4a16_matmul

# Rows, launch, K, columns of the members, rank: a ring that is filled once and several times, parts of unequal length,
# columns that no block has, streams with fewer steps than blocks, low rank made by tasks of the kernel and by a launch
# before, multicast clusters, clusters that take half of the rows at a time.
CASES = [
    (1, Launch(2, 1, 6, 2), 768, (768,), 0),
    (50, Launch(2, 1, 3, 2), 320, (256, 128), 32),
    (33, Launch(2, 1, STREAM_K, 2), 1024, (128,), 16),
    (64, Launch(2, 2, 1, 1), 1024, (320,), 0),
    (100, Launch(1, 1, 6, 2), 768, (192, 64), 8),
    (90, Launch(1, 2, 4, 1), 576, (128, 64, 64), 128),
    (8, Launch(2, 2, STREAM_K, 2), 1024, (768,), 0),
    (16, Launch(2, 3, STREAM_K, 1), 832, (384, 256), 16),
    (31, Launch(1, 5, STREAM_K, 1), 64, (704,), 0),
    (128, Launch(2, 2, STREAM_K, 1), 448, (256, 256), 64),
    (128, Launch(2, 2, 6, 1), 768, (256,), 0),  # sums that take more memory than the ring had
    (130, Launch(1, 3, STREAM_K, 1), 320, (256, 64, 128), 32),
    (140, Launch(1, 3, 2, 1), 448, (192, 128), 32),
    (150, Launch(1, 3, STREAM_K, 1), 320, (256, 64, 128), 64),
    (250, Launch(1, 2, STREAM_K, 1), 832, (192, 64), 128),
    (270, Launch(2, 2, STREAM_K, 1), 192, (256, 128), 16),
    (600, Launch(1, 2, STREAM_K, 1), 192, (320,), 8),
    (160, Launch(2, 2, 3, 1), 320, (256, 128), 16),
    (250, Launch(1, 1, 4, 2), 448, (128,), 0),
    (700, Launch(1, 3, 2, 1), 256, (192, 64), 128),
]


@pytest.mark.parametrize(("rows", "launch", "K", "slices", "rank"), CASES, ids=str)
def test_the_product_and_the_adapter(gpu, linear, adapter, on_gpu, rows, launch, K, slices, rank):
    tensors, dense = linear(K, slices)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()
    bias = torch.linspace(-1, 1, sum(slices)).bfloat16()
    its = adapter(K, slices, rank, rows) if rank else None
    assert its is None or can_fuse(*its[:3], launch)
    outs = [w4a16_matmul(x, *tensors, bias, its, launch) for _ in range(3)]
    expected = x.double() @ dense.T + bias.double()
    if its is None:
        error = (outs[0].double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()
    else:
        on_gpu.assert_adapted(outs[0], x, expected, its, slices, on_gpu.own_parts(launch))
    assert all(torch.equal(outs[0], out) for out in outs)
    on_gpu.assert_flags_are_left_at_zero(torch.device("cpu"))


# The same, with low rank made by every block: blocks of one member and of several, with as many rows of A as a wgmma
# takes or fewer; columns that no block has.
OWN = [
    (1, Launch(2, 1, 4, 2, EACH), 768, (768,), 32),
    (7, Launch(2, 1, 3, 3, EACH), 320, (256, 256), 16),
    (16, Launch(2, 2, 2, 2, EACH), 448, (384, 128), 8),
    (31, Launch(2, 1, 3, 2, EACH), 832, (256, 128, 128), 32),
    (32, Launch(1, 4, 1, 1, EACH), 320, (64, 64, 192), 16),
    (50, Launch(2, 2, 4, 1, EACH), 1024, (256, 128, 128), 32),
    (60, Launch(2, 3, 8, 1, EACH), 896, (640,), 64),
    (64, Launch(2, 1, 1, 2, EACH), 1024, (128, 128), 64),
    (64, Launch(1, 2, 2, 2, EACH), 640, (192, 64), 8),
]


@pytest.mark.parametrize(("rows", "launch", "K", "slices", "rank"), OWN, ids=str)
def test_every_block_makes_the_low_rank(gpu, linear, adapter, on_gpu, rows, launch, K, slices, rank):
    assert _own_rows(launch, adapter(K, slices, rank, rows))
    test_the_product_and_the_adapter(gpu, linear, adapter, on_gpu, rows, launch, K, slices, rank)


def test_no_token_has_the_adapter_where_every_block_makes_the_low_rank(gpu, linear, adapter):
    K, slices, launch, rows = 320, (256, 128), Launch(2, 1, 3, 2, EACH), 20
    tensors, _ = linear(K, slices)
    x, its = torch.randn(rows, K).bfloat16(), adapter(K, slices, 16, rows)
    its.slots[:] = -1
    assert torch.equal(w4a16_matmul(x, *tensors, None, its, launch), w4a16_matmul(x, *tensors, None, None, launch))


@pytest.mark.parametrize("rank", [32, 128])
def test_low_rank_of_too_many_rows_of_a_is_gathered(gpu, linear, adapter, rank):
    K, slices, launch = 320, (128, 256, 128), Launch(2, 3, 2, 1, EACH)
    tensors, _ = linear(K, slices)
    x, its = torch.randn(40, K).bfloat16(), adapter(K, slices, rank, 40)
    assert not _own_rows(launch, its)
    gathered = w4a16_matmul(x, *tensors, None, its, launch._replace(intermediate=0))
    assert torch.equal(w4a16_matmul(x, *tensors, None, its, launch), gathered)


@pytest.mark.parametrize("rows", [1, 70])
def test_the_low_rank(gpu, rows):
    x, a = torch.randn(rows, 576).bfloat16(), torch.randn(24, 576).bfloat16()
    slots = torch.arange(rows) % 3 - 1
    scale = torch.full((1,), 2.0**-11)  # times 256: an eighth
    expected = x.double() @ a.double().T * (slots[:, None] >= 0)
    out = low_rank(x, a, slots, scale)
    assert ((out.double() / 8 - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()
    assert torch.equal(out, low_rank(x, a, slots, scale))


def test_a_stream_of_fewer_steps_than_blocks_brings_low_only_where_it_is_added(gpu, linear, adapter, on_gpu):
    """A copy that nobody waits for would end in the shared memory of the next block there."""
    K, slices, launch, rows = 192, (256,), Launch(2, 2, STREAM_K, 1), 97
    tensors, dense = linear(K, slices)
    x, its = torch.randn(rows, K).bfloat16(), adapter(K, slices, 64, rows)
    for _ in range(10):
        on_gpu.assert_adapted(w4a16_matmul(x, *tensors, None, its, launch), x, x.double() @ dense.T, its, slices)


def test_every_entry_of_tokens_is_there():
    assert {padded_rows(rows) for rows, *_ in CASES} == set(TOKENS)
