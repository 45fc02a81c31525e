"""X W^T for a few rows of X and a 4-bit W in the layout of `kernels.tiled`, with the adapter's product in its epilogue.

In CUDA C++ (small_batch.cu), compiled by NVRTC on first use. Sums are kept in float32 to the end and taken in a fixed
order, where humming adds partial sums in bf16 as they come.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl_qerl.kernels.lora import num_splits

MAX_ROWS = 16
COLUMNS = 64  # of a tile of the output, which belongs to one member of a fused linear
RANKS = (8, 16, 32, 64, 128)
LAUNCHES = ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (8, 4), (8, 8))  # see `launch` below
_AHEAD = 4  # tiles that a warp has under way
_POWERS = [1 << k for k in (2, 4, 6, 8, 12)]


class Adapter(NamedTuple):
    """The second half of the low-rank product; tensors as in `kernels.lora.lora_expand`."""

    partial: torch.Tensor
    b: torch.Tensor
    members: torch.Tensor
    slots: torch.Tensor


def can_fuse(b: torch.Tensor, members: torch.Tensor) -> bool:
    """Whether the epilogue takes an adapter of this rank on a linear with these members."""
    return b.shape[1] in RANKS and b.shape[0] // len(members) % COLUMNS == 0


def small_batch_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    launch: tuple[int, int] | None = None,
) -> torch.Tensor:
    """X W^T + bias + the low-rank product, on a GPU of compute capability 9.0; the same bits each time.

    Args:
        x: [M, K] bf16, contiguous, M <= MAX_ROWS, K % 16 == 0.
        words: Of `kernels.tiled.tile`, [K / 16, 2 N] int32.
        scale: Of `kernels.tiled.tile`, [K / 16, N] uint8; every byte at least 8 (2**-6, as the format asks).
        global_decode_scale: [1] float32.
        bias: [N] bf16 or None.
        adapter: One that `can_fuse` accepts, or None.
        launch: One of LAUNCHES: thread blocks that share 64 columns, and warps of each. None guesses.

    Returns:
        [M, N] bf16.

    Raises:
        ValueError: M is too large.
    """
    M, K = x.shape
    N = scale.shape[1]
    if M > MAX_ROWS:
        raise ValueError(f"too many rows: {M}. Up to {MAX_ROWS} are accepted. Use another kernel for larger batches.")
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    split, warps = launch or guess_launch(N, K)
    parts, b, members, slots = adapter or (y, y, y, y)
    rank = b.shape[1] if adapter else 0
    per_entry, columns, splits = 1, 0, 0
    if adapter:
        per_entry, columns, splits = N // len(members) // COLUMNS, parts.shape[2], num_splits(M, K)
    kernel = _compile((N, K), split, warps, 8 if M <= 8 else 16, rank)
    args = [words, scale, global_decode_scale, x, y, y if bias is None else bias, parts, b, members, slots]
    args += [M, int(bias is not None), per_entry, columns, splits, *_POWERS]
    kernel(grid=(N // COLUMNS * split, 1, 1), block=(warps * 32, 1, 1), args=args)
    return y


def guess_launch(N: int, K: int) -> tuple[int, int]:
    """A launch that fills the GPU, for shapes that were not measured."""
    if N // COLUMNS >= 400:
        return 1, 4
    return (8 if K > 8192 else 4), 8


@functools.cache
def _compile(shape: tuple[int, int], split: int, warps: int, tokens: int, rank: int) -> Any:
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    values = {"SPLIT": split, "WARPS": warps, "TOKENS": tokens, "AHEAD": _AHEAD, "RANK": rank}
    values |= dict(zip("NK", shape, strict=True))
    defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
    return torch.cuda._compile_kernel(defines + source, "small_batch")
