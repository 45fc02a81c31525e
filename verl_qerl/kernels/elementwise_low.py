"""RMSNorm and SiLU that make X A^T of the X that they give, for the packed linear with an adapter that takes it.

In CUDA C++ (elementwise_low.cu): without the launch of `kernels.low_rank`, and without reading X again.
`kernels.tiled_matmul` asks `recall` for it; whatever made X, it would make the same by itself.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from verl_qerl.kernels.launch import Kernel, read_source

MAX_COLUMNS = 6144  # of a norm: more do not stay in registers
_CLUSTER = 8  # thread blocks that share the columns of 16 rows
_ROWS = 16  # of a cluster; a warp each
_TILES = 4  # most of 8 rows of A for a warp
_SHARED_BYTES = 220 << 10  # most that a thread block asks for
_FILES = ("decode.cuh", "mma.cuh", "grid.cuh", "elementwise.cuh", "elementwise_low.cu")


class _Made(NamedTuple):
    """X A^T of the last call, until it is recalled: memory stays taken as long as somebody holds it."""

    x: tuple[int, torch.Size]
    a: int
    low: torch.Tensor


_made: _Made | None = None


def can_make_low(K: int, columns: int) -> bool:
    """Whether the functions here take rows of K columns (a norm: at most MAX_COLUMNS) and so many rows of A."""
    fits = K % 64 == 0 and columns % 8 == 0 and 0 < columns <= _TILES * 8 * _ROWS
    return fits and _shared_bytes(K, columns) <= _SHARED_BYTES


def add_rms_norm_low(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    a: torch.Tensor,
    slots: torch.Tensor,
    global_decode_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.elementwise.add_rms_norm` on a GPU of compute capability 9.0; X A^T of its first result is kept.

    Args:
        x: [M, K] bf16, contiguous, K % 64 == 0, K <= MAX_COLUMNS.
        residual: As x.
        weight: [K] bf16 or float32.
        epsilon: Added to the mean of the squares.
        a: [columns, K] bf16, contiguous; `can_make_low` takes it.
        slots: [>= M] int64; rows of x with a negative entry have no adapter.
        global_decode_scale: [1] float32, a power of two; of the linear that X is for.

    Returns:
        As `add_rms_norm`.
    """
    (M, K), columns = x.shape, a.shape[0]
    low = _room(x, a)
    y, total = torch.empty_like(x), torch.empty_like(x)
    args = [x, residual, weight, y, total, a, global_decode_scale, slots, low, M, K, ctypes.c_float(epsilon)]
    kernel = _norm_kernel(columns, _chunks(K), weight.dtype == torch.float32)
    _launch(kernel, M, K, columns, args)
    _keep(y, a, low)
    return y, total


def silu_mul_low(
    x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, global_decode_scale: torch.Tensor
) -> torch.Tensor:
    """`kernels.elementwise.silu_mul`, on a GPU of compute capability 9.0; X A^T of its result is kept.

    Args:
        x: [M, 2 K] bf16, contiguous, K % 64 == 0.
        a: As in `add_rms_norm_low`, like all that follow.
        slots: As there.
        global_decode_scale: As there.

    Returns:
        [M, K] bf16.
    """
    M, K, columns = x.shape[0], x.shape[1] // 2, a.shape[0]
    low = _room(x, a)
    y = torch.empty((M, K), dtype=x.dtype, device=x.device)
    _launch(_silu_kernel(columns), M, K, columns, [x, y, a, global_decode_scale, slots, low, M, K])
    _keep(y, a, low)
    return y


def recall(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor | None:
    """X A^T / (256 global_decode_scale) as of `low_rank`, if the last call here made it; once.

    Args:
        x: What that call returned.
        a: What it was given.
    """
    made = _made
    _forget()
    if made is None or (made.x, made.a) != ((x.data_ptr(), x.shape), a.data_ptr()):
        return None
    return made.low


def _forget() -> None:
    global _made
    _made = None


def _room(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    _forget()  # its memory first
    return torch.empty((x.shape[0], a.shape[0]), dtype=torch.bfloat16, device=x.device)


def _keep(y: torch.Tensor, a: torch.Tensor, low: torch.Tensor) -> None:
    global _made
    _made = _Made((y.data_ptr(), y.shape), a.data_ptr(), low)


def _launch(kernel: Kernel, M: int, K: int, columns: int, args: list) -> None:
    kernel(-(-M // _ROWS) * _CLUSTER, _ROWS * 32, args, _shared_bytes(K, columns), _CLUSTER)


def _slices(columns: int) -> int:
    """Parts of K that warps of a block share, so that none has more than _TILES tiles of columns."""
    slices = _ROWS
    while slices > 1 and -(-(columns // 8) // (_ROWS // slices)) > _TILES:
        slices //= 2
    return slices


def _shared_bytes(K: int, columns: int) -> int:
    """The rows of a block, and in their place sums of its warps; as elementwise_low.cu lays them out."""
    slices = _slices(columns)
    stripes = _ROWS // slices
    width = -(-(columns // 8) // stripes) * stripes * 8
    pitch = _part(K) * 4 | 4
    return max(_ROWS * pitch * 16, slices * _ROWS * (width | 8) * 4)


def _chunks(K: int) -> int:
    """Of 8 columns, most of a lane."""
    return -(-_part(K) // 8)


def _part(K: int) -> int:
    """Most columns of a block, in 32."""
    return -(-(K // 32) // _CLUSTER)


def prepare(norms: Iterable[tuple[int, int, torch.dtype]], activations: Iterable[int]) -> None:
    """Compile what these need now, not on first use.

    Args:
        norms: Rows of A, columns of the norm's rows and dtype of its weight, each.
        activations: Rows of A, each.
    """
    torch.cuda.synchronize()  # the device has a context
    for columns, K, weight_dtype in norms:
        _norm_kernel(columns, _chunks(K), weight_dtype == torch.float32)
    for columns in activations:
        _silu_kernel(columns)


def source(columns: int, chunks: int, wide: bool) -> str:
    """CUDA C++ of the kernels, the norm for rows of up to 2048 * chunks columns."""
    defines = {"COLUMNS": columns, "SLICES": _slices(columns), "CLUSTER": _CLUSTER}
    return read_source(*_FILES, **defines, CHUNKS=chunks, WIDE=int(wide))


@functools.cache
def _norm_kernel(columns: int, chunks: int, wide: bool) -> Kernel:
    return Kernel(source(columns, chunks, wide), "rms_norm_low")


@functools.cache
def _silu_kernel(columns: int) -> Kernel:
    return Kernel(source(columns, 1, False), "silu_mul_low")
