"""X A^T for 65 rows and more, as `w4a16_matmul` wants it: in CUDA C++ (low_rank.cu), a launch of its own.

With fewer rows that kernel makes it by itself, in less time than a launch takes. Here it is made once for all parts
that the rows are multiplied in.
"""

import functools

import torch

from verl_qerl.kernels.rollout.launch import Kernel, read_source

_CLUSTER = 8  # thread blocks that share K
_WARPS, _TILES = 8, 2  # of a thread block; times 8 rows of A that it takes
_FILES = ("decode.cuh", "mma.cuh", "grid.cuh", "low_rank.cu")


def low_rank(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, global_decode_scale: torch.Tensor) -> torch.Tensor:
    """X A^T / (256 global_decode_scale), on a GPU of compute capability 9.0; the same bits each time.

    Args:
        x: [M, K] bf16, contiguous, K % 64 == 0.
        a: [columns, K] bf16, contiguous, columns % 8 == 0.
        slots: [>= M] int64; rows of x with a negative entry give zero.
        global_decode_scale: [1] float32, a power of two.

    Returns:
        [M, columns] bf16, rounded once.
    """
    (M, K), columns = x.shape, a.shape[0]
    low = torch.empty((M, columns), dtype=torch.bfloat16, device=x.device)
    blocks = -(-M // 16) * -(-columns // (8 * _TILES)) * _CLUSTER
    args = [x, a, global_decode_scale, slots, low, M, K, columns]
    low_rank_kernel()(blocks, _WARPS * 32, args, cluster=_CLUSTER)
    return low


@functools.cache
def low_rank_kernel() -> Kernel:
    """The kernel, compiled by the first call."""
    return Kernel(source(), "low_rank")


def source() -> str:
    """CUDA C++ of the kernel."""
    return read_source(*_FILES, WARPS=_WARPS, TILES=_TILES, CLUSTER=_CLUSTER)
