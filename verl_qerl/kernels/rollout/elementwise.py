"""What lies between the linears of a layer: residual addition with RMSNorm, and SiLU times its neighbour.

In vLLM's arithmetic (its modules' forward_native), which is transformers': float32 inside, the normalized row and the
activation rounded to bf16 before they are multiplied. On a GPU in CUDA C++ (elementwise.cu) for compute capability 9.0.
The norms whose tokens have weights of their own also run on other GPUs, in torch.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch

from verl_qerl.kernels.rollout.launch import Kernel, read_source

MAX_COLUMNS = 16384  # of a norm: more do not stay in registers
CHUNK = 8  # columns that a thread loads at a time
_THREADS, _MANY_THREADS = 256, 512  # most of a block for a row
_CHUNKS = 4  # most of a thread before a block takes many threads
_SILU_THREADS = 128
_FILES = ("decode.cuh", "grid.cuh", "elementwise.cu")


def can_normalize(weight: torch.Tensor) -> bool:
    """Whether `rms_norm` and `add_rms_norm` take rows of bf16 with this weight on a GPU."""
    K = weight.shape[0]
    return weight.dtype in (torch.bfloat16, torch.float32) and K % CHUNK == 0 and K <= MAX_COLUMNS


def can_silu(x: torch.Tensor) -> bool:
    """Whether `silu_mul` takes rows like these on a GPU."""
    return x.dtype == torch.bfloat16 and x.shape[-1] % (2 * CHUNK) == 0


@torch.library.custom_op("verl_qerl::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, ids: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight.

    Args:
        x: [T, ..., K] bf16, K % 8 == 0, K <= MAX_COLUMNS. With `ids` the kernel takes such rows, and torch the rest.
        weight: [K] bf16 or float32; with `ids` [N, K] float32, the weights that there are.
        ids: [M] int32, T <= M, each token's row of `weight`; None: all have the same.

    Returns:
        Shape and dtype of x.
    """
    if _launches(x, ids):
        return _launch_norm(x, None, weight, epsilon, ids)[0]
    return normalized(x.float(), _of_tokens(x, weight, ids), epsilon).to(x.dtype)


@torch.library.custom_op("verl_qerl::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, which is rounded for the second result alone.

    Args:
        residual: Shape and dtype of x.

    Returns:
        The normalized sum, and the sum; shape and dtype of x.
    """
    if _launches(x, ids):
        return _launch_norm(x, residual, weight, epsilon, ids)
    total = x.float() + residual.float()
    return normalized(total, _of_tokens(x, weight, ids), epsilon).to(x.dtype), total.to(x.dtype)


@rms_norm.register_fake
def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@add_rms_norm.register_fake
def _two_like(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("verl_qerl::silu_mul", mutates_args=())
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the left half of x, times its right half.

    Args:
        x: [..., 2 I] bf16, I % 8 == 0.

    Returns:
        [..., I] bf16.
    """
    if x.is_cuda:
        return _launch_silu(x)
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@silu_mul.register_fake
def _half_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def prepare(norms: Iterable[tuple[int, torch.dtype]]) -> None:
    """Compile the activation and what norms need now, not on first use.

    Args:
        norms: Columns of the rows and dtype of the weight, each.
    """
    torch.cuda.synchronize()  # the device has a context
    _silu_kernel()
    for K, weight_dtype in norms:
        _norm_kernel(*_block(K), weight_dtype == torch.float32)


def prepare_rows(columns: Iterable[int], device: torch.device) -> None:
    """Compile what norms with a weight for each token need now, not on first use.

    Args:
        device: A GPU; nothing is compiled for one that the kernels do not run on.
    """
    torch.cuda.synchronize()  # the device has a context
    for K in columns:
        if _has_kernel(device, torch.bfloat16, K):
            _norm_kernel(*_block(K), True, True)


def normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of float32 rows, rounded to the weight's dtype before the product with it."""
    scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (x * scale).to(weight.dtype) * weight


def _launches(x: torch.Tensor, ids: torch.Tensor | None) -> bool:
    return x.is_cuda if ids is None else _has_kernel(x.device, x.dtype, x.shape[-1])


def _of_tokens(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The weight of each token of x [T, ..., K]."""
    if ids is None:
        return weight
    return weight.index_select(0, ids[: x.shape[0]]).view(-1, *[1] * (x.ndim - 2), weight.shape[1])


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, K = x.contiguous(), x.shape[-1]
    threads, chunks = _block(K)
    rows = x.numel() // K
    y = torch.empty_like(x)
    adds = residual is not None
    total = torch.empty_like(x) if adds else y
    args = [x, residual.contiguous() if adds else x, weight, y, total, K, int(adds), ctypes.c_float(epsilon)]
    if ids is not None:
        if x.shape[0] > ids.shape[0]:
            raise ValueError(f"{x.shape[0]} tokens have {ids.shape[0]} row ids. Accepted are at most as many tokens.")
        args += [ids, rows // max(x.shape[0], 1)]
    _norm_kernel(threads, chunks, weight.dtype == torch.float32, ids is not None)(rows, threads, args)
    return y, total


def _launch_silu(x: torch.Tensor) -> torch.Tensor:
    y = _half_like(x)
    count = y.numel() // CHUNK
    args = [x.contiguous(), y, y.shape[-1] // CHUNK, count]
    _silu_kernel()(-(-count // _SILU_THREADS), _SILU_THREADS, args)
    return y


def _block(K: int) -> tuple[int, int]:
    """Threads for a row of K columns, and chunks of 8 of them for each."""
    most = _THREADS if K <= _THREADS * _CHUNKS * CHUNK else _MANY_THREADS
    chunks = -(-K // (CHUNK * most))
    return -(-K // (CHUNK * chunks * 32)) * 32, chunks


def source(threads: int, chunks: int, wide: bool, head_norms: bool = False, rows: bool = False) -> str:
    """CUDA C++ of the kernels, the norm for rows of up to 8 * threads * chunks columns."""
    flags = {"WIDE": int(wide), "NORMS": int(head_norms), "ROWS": int(rows)}
    return read_source(*_FILES, THREADS=threads, CHUNKS=chunks, **flags)


@functools.cache
def _has_kernel(device: torch.device, dtype: torch.dtype, K: int) -> bool:
    """Whether the kernel takes rows of K columns with weights in float32."""
    fits = device.type == "cuda" and dtype == torch.bfloat16 and K % CHUNK == 0 and K <= MAX_COLUMNS
    return fits and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _norm_kernel(threads: int, chunks: int, wide: bool, rows: bool = False) -> Kernel:
    return Kernel(source(threads, chunks, wide, rows=rows), "rms_norm")


@functools.cache
def _silu_kernel() -> Kernel:
    return Kernel(source(_SILU_THREADS, 1, False), "silu_mul")
