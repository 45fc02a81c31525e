"""Which heads and caches the attention kernel takes, and that it fits a multiprocessor as often as it counts on."""

import pytest
import torch

from verl_qerl.kernels.rollout import attention
from verl_qerl.kernels.rollout.attention import HEAD_SIZES, MAX_GROUP, MAX_SEQUENCES, can_attend, can_read, source

CACHE, TABLE = torch.zeros(5, 2, 32, 2, 64, dtype=torch.bfloat16), torch.zeros(3, 7, dtype=torch.int32)


def test_heads_that_it_takes():
    assert all(can_attend(*heads) for heads in ((28, 4, 128), (14, 2, 64), (MAX_GROUP, 1, 128), (5, 5, 64)))
    assert not any(can_attend(*heads) for heads in ((28, 4, 96), (MAX_GROUP + 1, 1, 128), (7, 2, 128)))


def test_caches_that_it_reads():
    assert can_read(CACHE, TABLE)
    assert can_read(CACHE, torch.zeros(3, 9, dtype=torch.int32)[:, :7])
    for cache in (CACHE.half(), CACHE[:, :1], CACHE[:, :, :8], CACHE.transpose(2, 3), CACHE[0]):
        assert not can_read(cache, TABLE)
    for table in (TABLE.long(), TABLE.T, TABLE.expand(1, 3, 7)[0].new_zeros(MAX_SEQUENCES + 1, 1)):
        assert not can_read(CACHE, table)


@pytest.mark.parametrize("group", [1, MAX_GROUP])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_it_compiles_and_fits(compile_cuda, head_size, group):
    said = compile_cuda(source(head_size, group))
    assert "0 bytes spill stores" in said
    registers = int(said.split("Used ")[1].split()[0])
    assert registers * attention._WARPS * 32 * attention._BLOCKS <= 65536
    # A block takes 1 KiB more than it asks for, and 64 bytes at most for what the kernel declares itself.
    assert (attention._shared_bytes(head_size, 1024) + 1024 + 64) * attention._BLOCKS <= 227 << 10
