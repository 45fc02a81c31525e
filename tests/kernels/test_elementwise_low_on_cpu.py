"""That the sources compile where nvcc is; what they compute: tests/emulator, and on a GPU test_elementwise_low.py."""

import re

import pytest

from verl_qerl.kernels import elementwise_low


@pytest.mark.parametrize(
    ("columns", "K", "wide"),
    [(96, 3584, True), (64, 5120, False), (32, 3584, True), (24, 896, True), (384, elementwise_low.MAX_COLUMNS, True)],
)
def test_the_source_compiles_and_keeps_rows_in_registers(compile_cuda, columns, K, wide):
    told = compile_cuda(elementwise_low.source(columns, elementwise_low._chunks(K), wide))
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", told)]
    assert len(spilled) == 2
    assert max(spilled) <= 4


def test_two_blocks_fit_beside_each_other_where_that_matters():
    """A cluster of eight takes half of the multiprocessors that share a distributor at one block each."""
    # Norms and activations of 7B, 14B and 32B.
    for K, columns in ((3584, 96), (3584, 64), (5120, 96), (5120, 64), (18944, 32), (13824, 32), (27648, 32)):
        assert elementwise_low._shared_bytes(K, columns) <= 113 << 10
