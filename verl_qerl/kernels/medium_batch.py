"""X W^T for up to 128 rows of X and a 4-bit W in the layout of `kernels.tiled`, the adapter's product folded in.

In CUDA C++ (medium_batch.cu, shrink.cu): wgmma with the decoded weight as its left operand, from registers. Sums are
kept in float32 to the end and taken in a fixed order, so the same input gives the same bits.
"""

import functools
from typing import NamedTuple

import torch

from verl_qerl.kernels.launch import Kernel, read_source, tensor_map

RANKS = (8, 16, 32, 64, 128)
TOKENS = (8, 16, 32, 64, 96, 128)  # rows that kernels are compiled for
MAX_ROWS = TOKENS[-1]
_FEW = ((2, 1, 2), (2, 1, 3), (2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 4, 1), (1, 5, 1), (4, 1, 2))
# `pieces`, `groups` and `blocks` of Launch for which the sums stay in registers.
SHAPES = {
    8: _FEW,
    16: _FEW,
    32: _FEW,
    64: ((2, 1, 2), (2, 2, 1), (2, 3, 1), (1, 5, 1), (1, 2, 2), (1, 4, 1)),
    96: ((2, 1, 2), (2, 2, 1), (1, 3, 1), (1, 2, 1), (1, 1, 2)),
    128: ((2, 1, 2), (2, 2, 1), (1, 3, 1), (1, 2, 1), (1, 1, 2)),
}
# `fixed` and `step` of `launch_candidates`; 8 and 96 are extrapolated.
_MICROSECONDS = {8: (4.5, 0.33), 16: (4.5, 0.34), 32: (5.0, 0.38), 64: (6.0, 0.48), 96: (7.3, 0.56), 128: (8.7, 0.65)}
_LEAST_STEP = 0.2
_ALONE = 1.2  # where a warp waits for products that are short, or has no other warpgroup beside it
_MULTIPROCESSORS = (16,) * 6 + (18,) * 2  # of an H200, by the groups that a cluster fits into
_STEP = 64  # of K, a stage of the ring
_STAGES = 4  # fewest of the ring
_SPLITS = (1, 2, 3, 4, 6, 8)  # clusters of 5 and 7 were always slower
_SHRINK_SPLIT = 8  # thread blocks that share K
_FACTORS = (1 << 4, (1 << 12) + (1 << 6), (1 << 8) + (1 << 2))  # of decode.cuh
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for blocks that each take 1 KiB more
_SPARE_BYTES = 24 << 10  # left to the kernel before, with which this one overlaps


class Adapter(NamedTuple):
    """The second half of the low-rank product.

    Attributes:
        low: [M, L R] bf16, of `shrink`.
        b: [N, R] bf16, the scaling alpha / r folded in.
        members: Of `kernels.lora.member_of_tile`.
    """

    low: torch.Tensor
    b: torch.Tensor
    members: torch.Tensor


class Launch(NamedTuple):
    """How the work is dealt out.

    Attributes:
        pieces: Times 16 columns for each warp: 1, 2 or 4.
        groups: Warpgroups of a thread block.
        split: Thread blocks that share K, a cluster of up to 8.
        blocks: Thread blocks of a multiprocessor.
    """

    pieces: int
    groups: int
    split: int
    blocks: int

    @property
    def columns(self) -> int:
        """Columns of a thread block."""
        return 64 * self.pieces * self.groups


def can_multiply(N: int, K: int) -> bool:
    """Whether the kernel takes a weight [N, K]."""
    return N % 64 == 0 and K % _STEP == 0


def can_fuse(b: torch.Tensor, members: torch.Tensor, launch: Launch) -> bool:
    """Whether the kernel takes an adapter of this rank on a linear with these members."""
    return b.shape[1] in RANKS and b.shape[0] // len(members) % (64 * launch.pieces) == 0


def medium_batch_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    launch: Launch | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """X W^T + bias + the low-rank product, on a GPU of compute capability 9.0; the same bits each time.

    Args:
        x: [M, K] bf16, contiguous, M <= MAX_ROWS.
        words: Of `kernels.tiled.tile`, [K / 16, 2 N] int32, of a weight that `can_multiply` accepts.
        scale: Of `kernels.tiled.tile`, [K / 16, N] uint8; every byte at least 8 (2**-6, as the format asks).
        global_decode_scale: [1] float32, a power of two.
        bias: [N] bf16 or None.
        adapter: One that `can_fuse` accepts, or None.
        launch: None guesses.
        overlap: Start with the weights as soon as the kernel before lets it. Only after `shrink`: it begins when all
            that came before it has ended, so nothing may be writing the weights.

    Returns:
        [M, N] bf16.

    Raises:
        ValueError: M is too large.
    """
    M, K = x.shape
    N = scale.shape[1]
    if M > MAX_ROWS:
        raise ValueError(f"too many rows: {M}. Up to {MAX_ROWS} are accepted. Use another kernel for larger batches.")
    tokens = padded_rows(M)
    launch = launch or guess_launch(N, K, M)
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    low, b, members = adapter or (y, y, y)
    rank, per_entry, columns = (b.shape[1], N // len(members), low.shape[1]) if adapter else (0, N, 0)
    low_width = columns // max(rank, 1) * max(rank, 16)
    stages, shared_bytes = ring(tokens, K, low_width, launch)
    kernel = _compile(tokens, launch.pieces, launch.groups, launch.blocks)
    box = (4, _box(launch.columns))
    weight = [tensor_map(words, 8, box), tensor_map(scale, 1, box)]
    args = [
        *weight,
        global_decode_scale,
        tensor_map(x, 2, (tokens, _STEP), swizzle=True),
        y,
        y if bias is None else bias,
        low,
        b,
        members,
    ]
    args += [M, N, K, launch.split, stages, int(bias is not None), rank, per_entry, columns, *_FACTORS]
    grid = -(-N // launch.columns) * launch.split
    kernel(grid, launch.groups * 128 + _helpers(tokens, launch.pieces) * 32, args, shared_bytes, launch.split, overlap)
    return y


def ring(tokens: int, K: int, low_width: int, launch: Launch) -> tuple[int, int]:
    """Stages of the ring in shared memory, as many as fit or are needed, and bytes of shared memory."""
    stage = tokens * 128 + 4 * 9 * launch.columns + 16
    fixed = 1024 + 8 + -(-low_width // 64) * tokens * 128
    limit = (_SHARED_BYTES - (_SPARE_BYTES if launch.blocks == 1 else 0)) // launch.blocks - 1024
    steps = K // _STEP
    needed = -(-steps // launch.split)
    stages = max(_STAGES, min((limit - fixed) // stage, needed))
    return stages, max(fixed + stages * stage, 1024 + tokens * (launch.columns + 4) * 4)


def shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, global_decode_scale: torch.Tensor) -> torch.Tensor:
    """X A^T, the first half of the low-rank product; the kernel after it may start at once.

    Args:
        x: [M, K] bf16, contiguous, K % 32 == 0.
        a: [L R, K] bf16.
        slots: [>= M] int64; the result is zero for tokens with a negative entry.
        global_decode_scale: Of the weight, [1] float32, a power of two.

    Returns:
        [M, L R] bf16 over 256 * global_decode_scale, by which the matmul multiplies its sums; the same bits each time.
    """
    M, K = x.shape
    columns = a.shape[0]
    low = torch.empty((M, columns), dtype=torch.bfloat16, device=x.device)
    tiles = 1 if M <= 32 else 2
    blocks = -(-columns // (8 * tiles))
    args = [x, a, slots, low, global_decode_scale, M, K, columns, _SHRINK_SPLIT, blocks]
    _compile_shrink(tiles)(-(-M // 16) * blocks * _SHRINK_SPLIT, 256, args, cluster=_SHRINK_SPLIT)
    return low


def launch_candidates(N: int, K: int, tokens: int) -> list[Launch]:
    """Launches for a weight [N, K] and an entry of TOKENS, the most promising first.

    By a model of the time, fitted to what was measured on an H200: each wave of thread blocks begins and ends in
    `fixed` microseconds and takes `step` for each 64 of K and 256 columns of a multiprocessor.
    """
    fixed, step = _MICROSECONDS[tokens]
    steps = K // _STEP

    def cost(launch: Launch) -> float:
        tiles = -(-N // launch.columns)
        # A cluster stays within one group of multiprocessors.
        at_once = sum(size * launch.blocks // launch.split for size in _MULTIPROCESSORS)
        together = min(launch.blocks, -(-tiles * launch.split // sum(_MULTIPROCESSORS)))
        alone = (launch.pieces == 1 and tokens <= 64) or launch.groups * together == 1
        each = step * launch.columns * together / 256 * (_ALONE if alone else 1)
        return -(-tiles // at_once) * (fixed + -(-steps // launch.split) * max(_LEAST_STEP, each))

    splits = [split for split in _SPLITS if split <= steps]
    return sorted((Launch(p, g, split, b) for p, g, b in SHAPES[tokens] for split in splits), key=cost)


def guess_launch(N: int, K: int, M: int) -> Launch:
    """A launch for M rows of a shape that was not measured."""
    return launch_candidates(N, K, padded_rows(M))[0]


def padded_rows(rows: int) -> int:
    """The entry of TOKENS that as many rows run as."""
    return next(tokens for tokens in TOKENS if rows <= tokens)


def _box(columns: int) -> int:
    """Columns that the copy engine takes at a time."""
    return next(box for box in (256, 192, 128, 64) if columns % box == 0)


def _helpers(tokens: int, pieces: int) -> int:
    """Warps that do not multiply: a whole warpgroup where its registers are wanted."""
    return 4 if tokens * pieces >= 256 else 2


def _registers(tokens: int, pieces: int, groups: int, blocks: int) -> int:
    """What a multiplying thread gets when the helpers keep 40 each; 0 leaves all as they start."""
    if _helpers(tokens, pieces) == 2:
        return 0
    at_start = 512 // (blocks * (groups + 1)) // 8 * 8
    return min(240, (at_start * (groups + 1) - 40) // groups // 8 * 8)


def source(tokens: int, pieces: int, groups: int, blocks: int) -> str:
    """CUDA C++ of one kernel."""
    defines = {"TOKENS": tokens, "PIECES": pieces, "GROUPS": groups, "BLOCKS": blocks}
    defines["BOX"] = _box(64 * pieces * groups)
    defines |= {"REGISTERS": _registers(tokens, pieces, groups, blocks), "HELPERS": _helpers(tokens, pieces)}
    text = read_source("decode.cuh", "medium_batch.cu", **defines)
    return text.replace("@WGMMA@", _wgmma(tokens))


def _wgmma(tokens: int) -> str:
    half = tokens // 2
    names = [f"%{i}" for i in range(half + 5)]
    sums, a = ", ".join(names[:half]), ", ".join(names[half:-1])
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16"
    return f"""__device__ __forceinline__ void wgmma(float (&d)[{half}], const u32 (&a)[4], u64 x) {{
  asm volatile("{instruction} {{{sums}}}, {{{a}}}, {names[-1]}, 1, 1, 1, 0;"
               : {outputs}
               : {inputs}, "l"(x));
}}"""


@functools.cache
def _compile(tokens: int, pieces: int, groups: int, blocks: int) -> Kernel:
    return Kernel(source(tokens, pieces, groups, blocks), "medium_batch")


@functools.cache
def _compile_shrink(tiles: int) -> Kernel:
    return Kernel(read_source("decode.cuh", "shrink.cu", COLUMN_TILES=tiles), "shrink")
