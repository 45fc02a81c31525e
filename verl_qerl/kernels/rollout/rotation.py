"""Rotary positions of q and k, and before them the norm of each head, where a model has one (Qwen3).

In the arithmetic of vLLM's and transformers' modules (as `kernels.rollout.elementwise`, whose source has the kernel).
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch

from verl_qerl.kernels.rollout.elementwise import CHUNK, can_normalize, normalized, source
from verl_qerl.kernels.rollout.launch import Kernel

_THREADS = 256
_MAX_HEAD = 32 * 2 * CHUNK  # that the threads of a warp share


def can_rotate(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, head_size: int) -> bool:
    """Whether `rotate` takes heads like these on a GPU."""
    of_tokens = q.ndim == k.ndim == 2 and positions.ndim == 1 and positions.dtype == torch.int64
    whole = table.shape[1] == head_size and head_size % (2 * CHUNK) == 0
    dealt_out = whole and _THREADS % (head_size // (2 * CHUNK)) == 0  # threads of a head, in whole heads
    return of_tokens and dealt_out and {q.dtype, k.dtype, table.dtype} == {torch.bfloat16}


def can_normalize_heads(q_weight: torch.Tensor, k_weight: torch.Tensor) -> bool:
    """Whether `rotate` takes norms with weights like these on a GPU, where `can_rotate` holds."""
    same = q_weight.dtype == k_weight.dtype and q_weight.shape == k_weight.shape
    return same and can_normalize(q_weight) and q_weight.shape[0] <= _MAX_HEAD


@torch.library.custom_op("verl_qerl::rotate", mutates_args=())
def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary positions: (x1, x2) of each head, its halves, become (x1 cos - x2 sin, x2 cos + x1 sin).

    Args:
        q: [T, heads * head_size] bf16.
        k: [T, heads * head_size] bf16; its number of heads may be another.
        positions: [T] int64.
        table: [positions, head_size] bf16, cosines and then sines.
        head_size: One that `can_rotate` accepts; with norms up to 512.
        q_norm: [head_size] bf16 or float32, the weight of an `rms_norm` of each head of q before the rotation, or None.
        k_norm: The same for the heads of k; both or none.
        epsilon: Added to the mean of the squares in each norm; without norms it is not read.

    Returns:
        The rotated q and k, contiguous.
    """
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    if q.is_cuda:
        return _launch(q, k, norms, epsilon, positions, table, head_size)
    heads = [x.unflatten(-1, (-1, head_size)) for x in (q, k)]
    if norms:
        heads = [normalized(x.float(), weight, epsilon).to(x.dtype) for x, weight in zip(heads, norms, strict=True)]
    cosine, sine = table.index_select(0, positions)[:, None].chunk(2, dim=-1)
    return _rotated(heads[0], cosine, sine), _rotated(heads[1], cosine, sine)


def prepare(norms: Iterable[torch.dtype] = ()) -> None:
    """Compile the rotation now, not on first use.

    Args:
        norms: dtypes of the weights of norms of heads.
    """
    torch.cuda.synchronize()  # the device has a context
    for dtype in (None, *norms):
        _kernel(dtype)


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).flatten(-2)


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """X itself when its rows can be loaded 8 columns at a time, as those of a slice of q, k and v."""
    can = x.stride(1) == 1 and x.stride(0) % CHUNK == 0 and x.data_ptr() % (2 * CHUNK) == 0
    return x if can else x.contiguous()


@rotate.register_fake
def _rotate_fake(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = _in_chunks(q), _in_chunks(k)
    turned = _rotate_fake(q, k)
    heads = [x.shape[1] // head_size for x in (q, k)]
    strides = [x.stride(0) // CHUNK for x in (q, k)]
    norms = [*(weights or (table, table)), ctypes.c_float(epsilon)]  # without norms any address will do
    args = [q, k, table.contiguous(), positions.contiguous(), *turned, head_size // 2 // CHUNK, *heads, *strides]
    _kernel(None if weights is None else weights[0].dtype)(q.shape[0], _THREADS, args + norms)
    return turned


@functools.cache
def _kernel(norms: torch.dtype | None) -> Kernel:
    return Kernel(source(_THREADS, 1, norms == torch.float32, norms is not None), "rotate")
