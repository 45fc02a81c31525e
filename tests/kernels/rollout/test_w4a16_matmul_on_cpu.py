"""What needs no GPU: the choice of adapters, shared memory, and that the sources compile where nvcc is."""

from itertools import product

import pytest
import torch

from verl_qerl.kernels.rollout import w4a16_matmul
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.w4a16_launch import (
    EACH,
    SHAPES,
    STREAM_K,
    TOKENS,
    Launch,
    multicast_blocks,
    own_rows,
    padded_rows,
)
from verl_qerl.kernels.rollout.w4a16_matmul import RANKS, Adapter

BLOCK_BYTES = (227 << 10) - 1024  # of shared memory that a thread block of Hopper can have, less its own 1 KiB

# An entry of TOKENS and a split, of each kernel; multicast_blocks stream.
KERNELS = [each for each in product(TOKENS, (STREAM_K, 1)) if each[1] == STREAM_K or multicast_blocks(each[0]) == 1]


@pytest.mark.parametrize(
    ("slices", "rank", "pieces", "expected"),
    [
        ((128, 64), 32, 1, True),
        ((128, 64), 32, 2, False),
        ((128, 128), 8, 2, True),
        ((96, 32), 32, 1, False),
        ((128, 64), 24, 1, False),
        ((64, 64, 64), 32, 1, True),
        ((64, 64, 64, 64), 32, 1, False),
    ],
    ids=str,
)
def test_takes_known_ranks_and_members_of_whole_warpgroups(slices, rank, pieces, expected):
    a, b = torch.zeros(len(slices) * rank, 64), torch.zeros(sum(slices), rank)
    launch = Launch(pieces, 2, 1, 1)
    assert w4a16_matmul.can_fuse(a, b, member_of_tile(slices, "cpu"), launch) is expected


@pytest.mark.parametrize(("tokens", "split"), KERNELS)
def test_the_ring_fits_with_the_widest_adapter(tokens, split):
    for pieces, groups, blocks in SHAPES[tokens]:
        for rank in (0, *RANKS):
            launch = Launch(pieces, groups, split, blocks)
            stages, shared_bytes = w4a16_matmul.ring(tokens, 18944, rank, launch)
            static = w4a16_matmul.low_static_bytes(tokens)
            assert stages >= 3  # the one that is read, the one before, whose products run, and one to fill
            assert shared_bytes <= BLOCK_BYTES - static
            if rank == 0:
                assert shared_bytes <= (BLOCK_BYTES + 1024) // blocks - 1024


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_the_ring_fits_where_every_block_makes_the_low_rank(tokens):
    for (pieces, groups, blocks), rank, members in product(SHAPES[tokens], RANKS, (1, 2, 3)):
        launch = Launch(pieces, groups, 1, blocks, EACH)
        own = own_rows(launch, rank, members, 128)
        stages, shared_bytes = w4a16_matmul.ring(tokens, 18944, rank, launch, own)
        assert not own or (stages >= 4 and shared_bytes <= (BLOCK_BYTES + 1024) // blocks - 1024)


@pytest.mark.parametrize(("tokens", "split"), [(64, STREAM_K), (96, 1)])
def test_no_stream_and_no_many_rows_have_blocks_that_make_the_low_rank(tokens, split):
    with pytest.raises(ValueError, match="intermediate=1"):
        w4a16_matmul.source(tokens, Launch(2, 2, split, 1, EACH))


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])  # above, X A^T has a launch of its own
@pytest.mark.parametrize(("K", "columns"), [(3584, 96), (18944, 32), (64, 8), (5120, 384)])
def test_blocks_that_others_wait_for_all_run(tokens, K, columns, monkeypatch):
    monkeypatch.setattr(w4a16_matmul, "count_multiprocessors", lambda device: 132)
    *_, shared, _ = w4a16_matmul._exchange.__wrapped__(torch.device("cpu"))
    for pieces, groups, blocks in SHAPES[tokens]:
        launch = Launch(pieces, groups, STREAM_K, blocks)
        split, tasks, workers = w4a16_matmul.low_rank_tasks(tokens, K, columns, launch, 132 * blocks, 132)
        assert workers <= 132 * blocks
        assert tasks == split * -(-tokens // 16) * -(-columns // (8 if tokens <= 32 else 16))
        assert split * tokens * columns <= shared.numel()
        assert shared.nbytes == 96 << 10


# Groups of multiprocessors of a GPU, which a cluster does not leave: a H200's, and those of parts with fewer.
GROUPS = ([16] * 6 + [18] * 2, [14] * 7 + [16], [16] * 6 + [18], [10] * 7 + [8], [15] * 8)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_blocks_that_others_wait_for_run_where_clusters_fit(groups):
    for tokens, split in product((8, 16, 32, 64), (1, 2, 3, 4, 6, 8)):
        for pieces, of_block, blocks in SHAPES[tokens]:
            launch = Launch(pieces, of_block, split, blocks)
            resident = sum(size * blocks // split for size in groups) * split
            for columns, grid in product((96, 384), (split, 85, 132, 1000)):
                _, tasks, workers = w4a16_matmul.low_rank_tasks(tokens, 4096, columns, launch, grid, sum(groups))
                assert min(tasks, workers, grid) <= resident


def test_the_memory_that_blocks_share_is_float32_while_vllm_loads_in_bf16(monkeypatch):
    monkeypatch.setattr(w4a16_matmul, "count_multiprocessors", lambda device: 132)
    torch.set_default_dtype(torch.bfloat16)
    try:
        sums, flags, low, done = w4a16_matmul._exchange.__wrapped__(torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert sums.dtype == low.dtype == torch.float32
    largest = max(tokens * 64 * p * g * b for tokens in TOKENS for p, g, b in SHAPES[tokens])
    assert sums.numel() == 132 * largest
    assert flags.numel() >= 132 * max(blocks for shapes in SHAPES.values() for *_, blocks in shapes)
    assert not done.any()


@pytest.fixture
def launched(monkeypatch):
    """Per launch: entry of TOKENS, rows of x, y, low and slots."""
    found = []

    def record(tokens, launch, x, weight, y, bias, adapter, low):
        found.append((tokens, len(x), len(y), len(low), adapter and len(adapter.slots)))

    monkeypatch.setattr(w4a16_matmul, "_launch", record)
    monkeypatch.setattr(w4a16_matmul, "tensor_map", lambda *_: None)
    monkeypatch.setattr(w4a16_matmul, "low_rank", lambda x, a, *_: x.new_zeros(len(x), len(a)))
    return found


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 8), (128, 128), (144, 144), (145, 192), (256, 256), (257, 144), (600, 256)]
)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("split", [STREAM_K, 2])
def test_any_number_of_rows_is_one_launch(rows, tokens, split, adapted, launched):
    slots = torch.zeros(rows + 3, dtype=torch.int64)
    adapter = Adapter(torch.zeros(8, 64), torch.zeros(64, 8), torch.zeros(1), slots) if adapted else None
    w4a16_matmul.w4a16_matmul(
        torch.zeros(rows, 64),
        torch.zeros(4, 128),
        torch.zeros(4, 64),
        torch.ones(1),
        None,
        adapter,
        Launch(1, 2, split, 1),
    )
    assert padded_rows(rows) == tokens
    at_a_time = tokens // 2 if split != STREAM_K and tokens > 128 else tokens
    assert launched == [(at_a_time, rows, rows, rows, adapter and rows + 3)]


def test_no_rows_are_no_launch(launched):
    weight = (torch.zeros(4, 128), torch.zeros(4, 64), torch.ones(1))
    assert w4a16_matmul.w4a16_matmul(torch.zeros(0, 64), *weight).shape == (0, 64)
    assert padded_rows(0) == TOKENS[0]  # a plan is asked for its launch before that
    assert not launched


@pytest.mark.parametrize(("tokens", "split"), [each for each in KERNELS if each[0] in (16, 64, 128, 192, 256)])
def test_the_source_compiles_without_waiting_for_each_product(tokens, split, compile_cuda):
    pieces, groups, blocks = max(SHAPES[tokens], key=lambda shape: shape[0] * shape[1])
    said = compile_cuda(w4a16_matmul.source(tokens, Launch(pieces, groups, split, blocks)))
    assert "serialized" not in said


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1), (2, 3, 1)], ids=str)
def test_the_source_with_low_rank_in_every_block_compiles_so_too(shape, compile_cuda):
    pieces, groups, blocks = shape
    said = compile_cuda(w4a16_matmul.source(64, Launch(pieces, groups, 1, blocks, EACH)))
    assert "serialized" not in said
    assert " 0 bytes spill stores" in said
