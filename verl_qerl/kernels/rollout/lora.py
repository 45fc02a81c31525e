"""Low-rank product of one adapter: y + (x A^T) B^T, in two operators without atomics or host work.

vLLM's own kernels gather tokens by adapter, add with atomics and take twelve launches a layer. In RL every token has
the same adapter or none, so A and B of a fused linear (q,k,v or gate,up) are stacked, and a mask per token is enough.

M tokens, K in_features, N out_features, R rank, L members of a fused linear:
    shrink   partial[s] = x A^T over the s-th part of K             A [L R, K]   partial [S M, L R] float32
    expand   y + bias + bf16(sum_s partial[s])_member B^T           B [N, R]
The sum over s runs in a fixed order: the same input gives the same bits. It is rounded to bf16 as PEFT's is under
autocast.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

MAX_SPLITS = 16  # parts of K
_TRITON_TOKENS = 64  # cuBLAS takes more
# Rows of `partial` beyond M: a size that is M plus a constant is the same expression for every M.
_MORE_ROWS = (MAX_SPLITS - 1) * _TRITON_TOKENS
_STAGED_BYTES = 112 * 1024  # of shared memory, that `shrink` wants for 16 tokens, 128 rows of A and four stages
_TILES = (128, 64, 32, 16)  # columns that a program of `expand` owns; all belong to one member


def num_splits(num_tokens: int, in_features: int) -> int:
    """Parts of K for a batch: many while tokens alone do not fill a GPU, one once cuBLAS fills it."""
    if num_tokens <= 16 or (num_tokens <= _TRITON_TOKENS and in_features > 8192):
        return MAX_SPLITS
    return 8 if num_tokens <= _TRITON_TOKENS else 1


def member_of_tile(slices: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """Which member of a fused linear each tile of output columns belongs to.

    Args:
        slices: Output columns of each member, in order.

    Returns:
        [N / tile] int32, with the largest tile that divides every member.

    Raises:
        ValueError: A member is no multiple of 16.
    """
    for tile in _TILES:
        if all(size % tile == 0 for size in slices):
            members = [member for member, size in enumerate(slices) for _ in range(size // tile)]
            return torch.tensor(members, dtype=torch.int32, device=device)
    raise ValueError(
        f"out_features {slices} are not all multiples of 16, which the single-adapter kernel needs."
        " Use vLLM's own with +qerl.rollout.lora=stock (in vLLM additional_config.verl_qerl.lora)."
    )


@torch.library.custom_op("verl_qerl::lora_shrink", mutates_args=())
def lora_shrink(x: torch.Tensor, a: torch.Tensor, none_active: torch.Tensor) -> torch.Tensor:
    """X A^T in parts.

    Args:
        x: [M, K] bf16.
        a: [L R, K] bf16.
        none_active: One bool on the CPU; true skips the work (read by the host, so constant within a CUDA graph).

    Returns:
        [>= S M, L R] float32, S = `num_splits(M, K)`: M rows of each part, one part after the other; anything where
        none is active.
    """
    partial = _empty_parts(x, a)
    if none_active.item():
        return partial
    if x.is_cuda:
        launch_shrink(x, a, partial)
    else:
        partial.zero_()[: x.shape[0]] = x.float() @ a.float().T
    return partial


@lora_shrink.register_fake
def _empty_parts(x: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0] + _MORE_ROWS, a.shape[0]), dtype=torch.float32)


@torch.library.custom_op("verl_qerl::lora_expand", mutates_args=())
def lora_expand(
    y: torch.Tensor,
    partial: torch.Tensor,
    b: torch.Tensor,
    members: torch.Tensor,
    slots: torch.Tensor,
    none_active: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
) -> torch.Tensor:
    """Y + bias + the low-rank product.

    Args:
        y: [M, N] bf16.
        partial: From `lora_shrink`.
        b: [N, R] bf16, the scaling alpha / r folded in.
        members: From `member_of_tile`.
        slots: [>= M] int64; tokens with a negative entry have no adapter.
        bias: [N] bf16 or None.
        in_features: K, which tells how many parts there are.

    Returns:
        [M, N] bf16.
    """
    if none_active.item():
        return y.clone() if bias is None else y + bias
    if y.is_cuda:
        return launch_expand(y, partial, b, members, slots, bias, in_features)
    total = y.float() if bias is None else y.float() + bias.float()
    M = y.shape[0]
    splits = num_splits(M, in_features)
    parts = partial[: splits * M].view(splits, M, partial.shape[1])
    low = parts.sum(0).to(y.dtype).float() * (slots[:M] >= 0)[:, None]
    rank, tile = b.shape[1], b.shape[0] // len(members)
    per_row = members.long().repeat_interleave(tile)
    for member in range(low.shape[1] // rank):
        rows = per_row == member
        total[:, rows] += low[:, member * rank : (member + 1) * rank] @ b[rows].float().T
    return total.to(y.dtype)


@lora_expand.register_fake
def _expand_fake(y: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def launch_shrink(x: torch.Tensor, a: torch.Tensor, partial: torch.Tensor) -> None:
    """Run the Triton kernel, or cuBLAS for large batches; shapes as in `lora_shrink`, `partial` is written."""
    M, K = x.shape
    if M > _TRITON_TOKENS and x.is_cuda:
        torch.ops.aten.mm.dtype_out(x, a.T, torch.float32, out=partial[:M])
        return
    columns = a.shape[0]
    splits = num_splits(M, K)
    rows, block_k = (16, 128) if M <= 16 else (32, 64)
    block_r = min(128, max(16, triton.next_power_of_2(columns)))
    grid = (triton.cdiv(M, rows), triton.cdiv(columns, block_r), splits)
    per_split = triton.cdiv(triton.cdiv(K, splits), block_k) * block_k
    stages = 4 if _shared_bytes(x.device) >= _STAGED_BYTES else 3
    tile: Any = {"ROWS": rows, "BLOCK_R": block_r, "BLOCK_K": block_k, "num_warps": 4, "num_stages": stages}
    _shrink_kernel[grid](x, a, partial, M, K, columns, x.stride(0), a.stride(0), per_split, **tile)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a thread block may have: 99 KiB where compute capability is 8.6, 8.9 or 12.0."""
    if device.type != "cuda":  # Triton's interpreter
        return _STAGED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit(do_not_specialize=["M"])  # a batch of any size runs what another has compiled
def _shrink_kernel(
    x_ptr,
    a_ptr,
    out_ptr,
    M,
    K,
    columns,
    x_stride,
    a_stride,
    per_split,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    x_rows = x_ptr + m[:, None].to(tl.int64) * x_stride
    a_rows = a_ptr + r[None, :].to(tl.int64) * a_stride
    total = tl.zeros((ROWS, BLOCK_R), dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < last
        x = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & in_k[None, :], other=0.0)
        a = tl.load(a_rows + k[:, None], mask=(r < columns)[None, :] & in_k[:, None], other=0.0)
        total = tl.dot(x, a, total)
    out = out_ptr + (split * M + m[:, None]).to(tl.int64) * columns + r[None, :]
    tl.store(out, total, mask=(m < M)[:, None] & (r < columns)[None, :])


def launch_expand(
    y: torch.Tensor,
    partial: torch.Tensor,
    b: torch.Tensor,
    members: torch.Tensor,
    slots: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
) -> torch.Tensor:
    """Run the Triton kernel; shapes as in `lora_expand`."""
    M, N = y.shape
    out = torch.empty((M, N), dtype=y.dtype, device=y.device)
    rank, columns, tile = b.shape[1], partial.shape[1], N // len(members)
    rows = 16 if M <= 16 else 32 if M <= 32 else 64
    grid = (N // tile, triton.cdiv(M, rows))
    # A part of 256 of the rank is what 99 KiB of shared memory hold beside 64 tokens.
    part = min(256, max(16, triton.next_power_of_2(rank)))
    shape: Any = {"ROWS": rows, "TILE": tile, "RANK": part, "PARTS": triton.cdiv(rank, part), "num_warps": 4}
    shape["HAS_BIAS"] = bias is not None
    tensors = (y, partial, b, members, slots, y if bias is None else bias, out)
    _expand_kernel[grid](*tensors, M, N, columns, rank, y.stride(0), num_splits(M, in_features), **shape)
    return out


@triton.jit(do_not_specialize=["M", "splits"])
def _expand_kernel(
    y_ptr,
    partial_ptr,
    b_ptr,
    members_ptr,
    slots_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    columns,
    rank,
    y_stride,
    splits,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
):
    tile = tl.program_id(0)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tile * TILE + tl.arange(0, TILE)
    in_rows = m < M
    member = tl.load(members_ptr + tile)
    y = tl.load(y_ptr + m[:, None].to(tl.int64) * y_stride + n[None, :], mask=in_rows[:, None], other=0.0)
    active = in_rows & (tl.load(slots_ptr + m, mask=in_rows, other=-1) >= 0)
    total = y.to(tl.float32)
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        r = part * RANK + tl.arange(0, RANK)
        b = tl.load(b_ptr + n[None, :] * rank + r[:, None], mask=(r < rank)[:, None], other=0.0)
        from_split = partial_ptr + m[:, None].to(tl.int64) * columns + member * rank + r[None, :]
        low = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for _ in range(0, splits):
            low += tl.load(from_split, mask=active[:, None] & (r < rank)[None, :], other=0.0)
            from_split += M * columns
        total = tl.dot(low.to(b.dtype), b, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n)[None, :].to(tl.float32)
    tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], total.to(y.dtype), mask=in_rows[:, None])
