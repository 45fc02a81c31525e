"""X A^T for 65 rows and more, as `w4a16_matmul` wants it: in CUDA C++ (low_rank.cu), a launch of its own.

With fewer rows that kernel makes it by itself, in less time than a launch takes. Here it is made once for all parts
that the rows are multiplied in. For `fp8_matmul` the same launch quantizes the rows.
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


def quantize_rows(
    x: torch.Tensor, a: torch.Tensor | None = None, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """X in E4M3 with a scale a row, and X A^T in the same launch, on a GPU of compute capability 9.0.

    Args:
        x: [M, K] bf16, contiguous, K % 64 == 0.
        a: [columns, K] bf16, contiguous, columns % 8 == 0; or None.
        slots: As in `low_rank`; None without a.

    Returns:
        Codes [M, K] float8_e4m3fn; scales [M, 1] float32, max |x| / 448 and at least 1 / (512 * 448); and X A^T, as of
        `low_rank` with a scale of 2**-8, None without a.
    """
    M, K = x.shape
    codes = torch.empty((M, K), dtype=torch.uint8, device=x.device)
    scales = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    blocks, low, product = 0, None, [x, x, x, x, x, M, K, 0]
    if a is not None:
        blocks = -(-M // 16) * -(-len(a) // (8 * _TILES)) * _CLUSTER
        low = torch.empty((M, len(a)), dtype=torch.bfloat16, device=x.device)
        product = [x, a, _no_scale(x.device), slots, low, M, K, len(a)]
    args = [*product, blocks, codes, scales]
    low_rank_kernel(True)(blocks + -(-M // _CLUSTER) * _CLUSTER, _WARPS * 32, args, cluster=_CLUSTER)
    return codes.view(torch.float8_e4m3fn), scales, low


@functools.cache
def _no_scale(device: torch.device) -> torch.Tensor:
    return torch.full((1,), 2.0**-8, dtype=torch.float32, device=device)


@functools.cache
def low_rank_kernel(quantizes: bool = False) -> Kernel:
    """The kernel, compiled by the first call."""
    return Kernel(source(quantizes), "low_rank")


def source(quantizes: bool = False) -> str:
    """CUDA C++ of the kernel, which quantizes the rows of x as well or does not."""
    return read_source(*_FILES, WARPS=_WARPS, TILES=_TILES, CLUSTER=_CLUSTER, QUANTIZE=int(quantizes))
