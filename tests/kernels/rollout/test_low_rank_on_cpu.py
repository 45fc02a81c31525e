"""That the source compiles where nvcc is; what it computes needs a GPU: test_low_rank.py."""

import pytest

from verl_qerl.kernels.rollout import low_rank


@pytest.mark.parametrize("quantizes", [False, True])
def test_the_source_compiles(compile_cuda, quantizes):
    assert "0 bytes spill stores" in compile_cuda(low_rank.source(quantizes))
