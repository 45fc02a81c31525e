"""That the source compiles where nvcc is; what it computes needs a GPU: test_low_rank.py."""

from verl_qerl.kernels.rollout import low_rank


def test_the_source_compiles(compile_cuda):
    assert "0 bytes spill stores" in compile_cuda(low_rank.source())
