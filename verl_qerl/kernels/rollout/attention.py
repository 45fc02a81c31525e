"""Attention of one new token of each sequence over a paged cache of keys and values, into which it puts its own.

In CUDA C++ (attention.cu) for compute capability 9.0: every thread block has an equal share of what the cache holds of
all sequences, and brings it while the kernels that make q, k and v still run.
"""

import ctypes
import functools
import math
from collections.abc import Iterable

import torch

from verl_qerl.kernels.rollout.launch import Kernel, count_multiprocessors, read_source, tensor_map

HEAD_SIZES = (64, 128)
MAX_GROUP = 8  # heads of q on one head of k and v
MAX_SEQUENCES = 4096  # their lengths are held in shared memory
_CHUNK = 16  # tokens that are read at a time; a page has a multiple of them
_WARPS, _STAGES, _BLOCKS = 4, 1, 4  # of a thread block, of a warp's ring, of a multiprocessor
_LEAST = 8  # chunks of a share: fewer are not worth the exchange
_VECTOR = 8  # columns that are loaded at a time
_FILES = ("decode.cuh", "grid.cuh", "mma.cuh", "copies.cuh", "pages.cuh", "attention.cu")


def can_attend(heads: int, kv_heads: int, head_size: int) -> bool:
    """Whether `decode_attention` takes heads like these."""
    return head_size in HEAD_SIZES and heads % kv_heads == 0 and heads // kv_heads <= MAX_GROUP


def can_read(cache: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether `decode_attention` reads a cache like this by tables like this."""
    fits = cache.ndim == 5 and cache.shape[1] == 2 and cache.shape[2] % _CHUNK == 0
    plain = fits and cache.is_contiguous() and cache.dtype == torch.bfloat16
    return plain and table.shape[0] <= MAX_SEQUENCES and table.stride(1) == 1 and table.dtype == torch.int32


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Softmax attention of one token a sequence, in float32 with weights rounded to bf16; the same bits each time.

    Args:
        q: [B, heads, head_size] bf16, rows side by side, heads as `can_attend` says.
        k: [B, kv_heads, head_size] bf16, of the new tokens.
        v: Shape and dtype of k.
        cache: [pages, 2, page, kv_heads, head_size] bf16, one that `can_read` accepts; keys, then values. It gets k
            and v.
        lengths: [>= B] int32, with the new token; 0 gives zeros.
        table: [>= B, pages of a sequence] int32.
        slots: [>= B] int64, the place (page * tokens of a page + token) of the new token; negative is nowhere.
        scale: By which scores are multiplied.
        out: [B, heads, head_size] bf16, contiguous; gets the result.
    """
    (B, heads, head_size), (_, _, page, kv_heads, _) = q.shape, cache.shape
    parts, counters = _exchange(q.device)
    rows = tensor_map(cache.view(-1, kv_heads * head_size), 2, (_CHUNK, 64), swizzle=True)
    strides = [x.stride(0) // _VECTOR for x in (q, k, v)]
    args = [rows, q, k, v, cache, lengths, table, slots, out, parts, counters, B, kv_heads, table.stride(0), page]
    args += [*strides, _LEAST, ctypes.c_float(scale * math.log2(math.e))]
    grid = min(B, 1) * count_multiprocessors(q.device) * _BLOCKS
    _kernel(head_size, heads // kv_heads)(grid, _WARPS * 32, args, _shared_bytes(head_size, B))


def prepare(shapes: Iterable[tuple[int, int]]) -> None:
    """Compile what is needed now, not on first use, and make the memory that launches share.

    Args:
        shapes: head_size, and heads of q on one of k and v; each.
    """
    torch.cuda.synchronize()  # the device has a context
    for shape in shapes:
        _kernel(*shape)
    _exchange(torch.device("cuda", torch.cuda.current_device()))


def _shared_bytes(head_size: int, sequences: int) -> int:
    ring = _WARPS * _STAGES * (2 * _CHUNK * head_size * 2 + 8)
    return 1024 + ring + _WARPS * 8 * (head_size + 6) * 4 + sequences * 4


def source(head_size: int, group: int) -> str:
    """CUDA C++ of the kernel for heads of this size, `group` of q on one of k and v."""
    return read_source(*_FILES, HEAD=head_size, GROUP=group, WARPS=_WARPS, STAGES=_STAGES, BLOCKS_PER_SM=_BLOCKS)


@functools.cache
def _kernel(head_size: int, group: int) -> Kernel:
    return Kernel(source(head_size, group), "attention")


@functools.cache
def _exchange(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts that blocks hand over, and how many of one head are there; a launch leaves the counters at zero."""
    blocks = count_multiprocessors(device) * _BLOCKS
    parts = torch.empty(2 * blocks * MAX_GROUP * (max(HEAD_SIZES) + 2), dtype=torch.float32, device=device)
    return parts, torch.zeros(blocks, dtype=torch.int32, device=device)
