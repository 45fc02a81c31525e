"""That the sources compile where nvcc is; what they compute: tests/emulator, and on a GPU test_elementwise_low.py."""

import pytest

from verl_qerl.kernels import elementwise_low


@pytest.mark.parametrize(
    ("columns", "K", "wide"), [(96, 3584, True), (64, 5120, False), (32, 3584, True), (24, 896, True)]
)
def test_the_source_compiles_and_keeps_rows_in_registers(compile_cuda, columns, K, wide):
    told = compile_cuda(elementwise_low.source(columns, elementwise_low._chunks(K), wide))
    assert told.count("0 bytes spill stores") == 2


def test_two_blocks_fit_beside_each_other_where_that_matters():
    """A cluster of eight takes half of the multiprocessors that share a distributor at one block each."""
    for K, columns in ((3584, 96), (3584, 64), (5120, 96), (5120, 64)):  # the norms of 7B to 32B
        assert elementwise_low._shared_bytes(K, columns) <= 113 << 10
