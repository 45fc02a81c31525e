"""X W^T for a packed 4-bit W in the layout of `kernels.rollout.repacking`, with the product of one adapter.

In CUDA C++ (w4a16_matmul.cu and its parts): wgmma with the decoded weight as its left operand, from registers. Sums are
kept in float32 to the end and taken in a fixed order, so the same input gives the same bits.
"""

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from verl_qerl.kernels.rollout.launch import Kernel, count_multiprocessors, read_source, tensor_map
from verl_qerl.kernels.rollout.low_rank import low_rank, low_rank_kernel
from verl_qerl.kernels.rollout.w4a16_launch import (
    EACH,
    GATHERED,
    H200_MULTIPROCESSORS,
    INTERMEDIATE_ROWS,
    SHAPES,
    STREAM_K,
    TOKENS,
    Launch,
    box_columns,
    can_make_intermediate,
    guess_launch,
    helper_registers,
    multicast_blocks,
    own_rows,
    padded_rows,
    registers,
    rows_at_a_time,
    wants_registers,
)

RANKS = (8, 16, 32, 64, 128)
_STEP = 64  # of K, a stage of the ring
_STAGES = 4  # fewest of the ring
_FILES = ("decode.cuh", "grid.cuh", "copies.cuh", "ring.cuh", "wgmma.cuh", "mma.cuh", "low_rank.cuh", "sums.cuh")
_FILES += ("own_intermediate.cuh", "w4a16_matmul.cu")
_MEMBERS = 3  # most of a fused linear
_LOW_SPLIT = 16  # most parts of K
_LOW_CHUNKS = 7  # of 32 of K for a warp: fewer are not worth another part
_LOW_BYTES = 96 << 10  # most that a thread block reads of the sums of X A^T
_LOW_WARPS = 2  # that do; with the two that fill the ring, a whole warpgroup
_HELPERS = 2 + _LOW_WARPS
_FACTORS = (1 << 4, 1 << 3, 1 << 6, (1 << 10) + (1 << 5) + 1)  # of decode.cuh
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for blocks that each take 1 KiB more


class Adapter(NamedTuple):
    """One adapter on a linear of L members.

    Attributes:
        a: [L R, K] bf16.
        b: [N, R] bf16, the scaling alpha / r folded in.
        members: From `kernels.rollout.lora.member_of_tile`.
        slots: [>= M] int64; tokens with a negative entry have no adapter.
    """

    a: torch.Tensor
    b: torch.Tensor
    members: torch.Tensor
    slots: torch.Tensor


def can_fuse(a: torch.Tensor, b: torch.Tensor, members: torch.Tensor, launch: Launch) -> bool:
    """Whether the kernel takes an adapter of this rank on a linear with these members; tensors as of `Adapter`."""
    rank = b.shape[1]
    fits = rank in RANKS and a.shape[0] <= _MEMBERS * rank
    return fits and b.shape[0] // len(members) % (64 * launch.warp_tiles) == 0


def w4a16_matmul(
    x: torch.Tensor,
    packed_codes: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """X W^T + bias + the low-rank product, on a GPU of compute capability 9.0; the same bits each time.

    Args:
        x: [M, K] bf16, contiguous.
        packed_codes: [K / 16, 2 N] int32, of `kernels.rollout.repacking.repack`; N % 64 == K % 64 == 0.
        scale: [K / 16, N] uint8, of the same; every byte at least 8 (2**-6, as the format asks).
        global_decode_scale: [1] float32, a power of two.
        bias: [N] bf16 or None.
        adapter: One that `can_fuse` accepts, or None.
        launch: For `padded_rows(M)`; None guesses.

    Returns:
        [M, N] bf16.
    """
    M, K = x.shape
    N = scale.shape[1]
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    if M == 0:
        return y
    launch = launch or guess_launch(N, K, M)
    tokens, low = rows_at_a_time(padded_rows(M), launch), x
    if adapter is not None and _is_given(tokens):
        low = low_rank(x, adapter.a, adapter.slots, global_decode_scale)
    box = (4, box_columns(launch.columns))
    weight = [tensor_map(packed_codes, 8, box), tensor_map(scale, 1, box), global_decode_scale]
    _launch(tokens, launch, x, weight, y, bias, adapter, low)
    return y


def _launch(
    tokens: int,
    launch: Launch,
    x: torch.Tensor,
    weight: Sequence[Any],
    y: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: Adapter | None,
    low: torch.Tensor,
) -> None:
    (M, K), N = x.shape, y.shape[1]
    rank, columns = (adapter.b.shape[1], adapter.a.shape[0]) if adapter else (0, 0)
    own = _own_rows(launch, adapter) if adapter else 0
    if not own:
        launch = launch._replace(intermediate=GATHERED)
    stages, shared_bytes = ring(tokens, K, rank, launch, own)
    multiprocessors = count_multiprocessors(x.device)
    beside, box = multicast_blocks(tokens), (tokens // multicast_blocks(tokens), _STEP)
    resident_blocks = multiprocessors * launch.blocks_per_sm // beside * beside
    row_tiles = -(-M // tokens)
    grid = resident_blocks if launch.split_k == STREAM_K else -(-N // launch.columns) * row_tiles * launch.split_k
    args = [*weight, tensor_map(x, 2, box, swizzle=True), y, y if bias is None else bias, x]
    sums, flags, parts, done = _exchange(x.device)
    low_or_a, its_box = (adapter.a, (own, _STEP)) if adapter and own else (low, box)
    args += [*(adapter or (y, y, y, y)), sums, flags, parts, done, tensor_map(low_or_a, 2, its_box, swizzle=True)]
    args += [M, N, K, launch.split_k, stages, int(bias is not None)]
    args += [rank, N // len(adapter.members) if adapter else N, own or columns]
    none = (1, 0, 0)
    tasks = none if own or _is_given(tokens) else low_rank_tasks(M, K, columns, launch, grid, multiprocessors)
    args += [*tasks, *_FACTORS, row_tiles]
    threads = (launch.warpgroups * 4 + _helpers(tokens, launch)) * 32
    _kernel(tokens, launch)(grid, threads, args, shared_bytes, max(launch.split_k, beside))


def _own_rows(launch: Launch, adapter: Adapter) -> int:
    (N, rank), members = adapter.b.shape, len(adapter.members)
    return own_rows(launch, rank, adapter.a.shape[0] // rank, N // members)


def ring(tokens: int, K: int, rank: int, launch: Launch, own: int = 0) -> tuple[int, int]:
    """Stages of the ring in shared memory, as many as fit or are needed, and its bytes; `own` is of own_rows."""
    held, barriers = (tokens + own) * 128 + 4 * 9 * launch.columns, 16
    # With stream-K X A^T of all members is kept, else each warpgroup keeps its own; more rows go through the ring.
    kept = 0 if _is_given(tokens) else _MEMBERS if launch.split_k == STREAM_K else launch.warpgroups
    kept = own // rank if own else kept
    low = -(-rank // 64) * tokens * 128 * kept
    fixed = 1024 + 16 + low
    if launch.split_k == STREAM_K:
        fixed += _out_rows(tokens) * (launch.columns + 8) * 2
    limit = _SHARED_BYTES // launch.blocks_per_sm - 1024 - (0 if own else low_static_bytes(tokens))
    needed = -(-(K // _STEP) // max(launch.split_k, 1)) + (
        launch.warpgroups * -(-rank // 64) if _is_given(tokens) else 0
    )
    stages = max(_STAGES, min((limit - fixed) // (held + barriers), needed))
    # The sums take the place of the ring and of X A^T, and none of the barriers.
    sums = 0 if launch.split_k == STREAM_K else tokens * (launch.columns + 4) * 4
    return stages, fixed + stages * barriers + max(stages * held, sums - low)


def low_static_bytes(tokens: int) -> int:
    """Bytes of shared memory that the kernel itself declares, for sums of X A^T."""
    return 0 if _is_given(tokens) else _LOW_WARPS * _low_tiles(tokens) * 512


def low_rank_tasks(
    M: int, K: int, columns: int, launch: Launch, grid: int, multiprocessors: int
) -> tuple[int, int, int]:
    """How X A^T is dealt out: parts of K, tasks in all, and thread blocks that take them.

    Args:
        M: Rows of X, at most INTERMEDIATE_ROWS.
        columns: Rows of A; 0 for none.
    """
    # So few that they all run at the same time, wherever clusters fit: the others wait for them. With stream-K all do.
    # On a H200 clusters fit onto three quarters at least; a group of multiprocessors that holds one, onto half of it.
    shares = 3 if multiprocessors == H200_MULTIPROCESSORS or launch.split_k == STREAM_K else 2
    workers = min(grid, multiprocessors * launch.blocks_per_sm * shares // 4)
    tiles = -(-M // 16) * -(-columns // (8 * _low_tiles(padded_rows(M))))
    split = 1
    while (
        split < _LOW_SPLIT
        and 2 * split * tiles <= workers
        and 2 * split * M * columns * 4 <= _LOW_BYTES
        and _LOW_CHUNKS * split * _LOW_WARPS < K // 32
    ):
        split *= 2
    return split, tiles * split, workers


def _is_given(tokens: int) -> bool:
    """Whether a launch before makes X A^T: with few rows the kernel does, and each thread block adds up its parts."""
    return tokens > INTERMEDIATE_ROWS


def _helpers(tokens: int, launch: Launch) -> int:
    """Warps that do not multiply: those that fill the ring and that gather; a whole warpgroup gives registers."""
    return _HELPERS - (_LOW_WARPS if launch.intermediate == EACH and not wants_registers(tokens, launch) else 0)


def _out_rows(tokens: int) -> int:
    """Rows of y that a stream-K block writes at a time."""
    return next(rows for rows in (32, 24, 16, 8) if tokens % rows == 0)


def _low_tiles(tokens: int) -> int:
    return 1 if tokens <= 32 else 2


def source(tokens: int, launch: Launch) -> str:
    """CUDA C++ of one kernel.

    Raises:
        ValueError: X A^T in each thread block is asked for with stream-K, or for more rows than one wgmma takes.
    """
    if launch.intermediate == EACH and not can_make_intermediate(tokens, launch):
        raise ValueError(
            f"{launch} for {tokens} rows: intermediate={EACH} is for split_k > 0 and up to {INTERMEDIATE_ROWS} rows."
            " Use 0."
        )
    text = read_source(
        *_FILES,
        TOKENS=tokens,
        WARP_TILES=launch.warp_tiles,
        WARPGROUPS=launch.warpgroups,
        BLOCKS_PER_SM=launch.blocks_per_sm,
        STREAM_K=int(launch.split_k == STREAM_K),
        GIVEN=int(_is_given(tokens)),
        EACH=launch.intermediate,
        MULTICAST=multicast_blocks(tokens),
        BOX=box_columns(launch.columns),
        OUT_TOKENS=_out_rows(tokens),
        LOW_WARPS=_LOW_WARPS,
        LOW_TILES=_low_tiles(tokens),
        LOW_AHEAD=6 if tokens <= 32 and launch.blocks_per_sm < 3 else 4,
        HELPERS=_helpers(tokens, launch),
        HELPER_REGISTERS=helper_registers(launch),
        REGISTERS=registers(tokens, launch),
    )
    return text.replace("@WGMMA@", _wgmma(tokens, launch.intermediate == EACH))


def _wgmma(tokens: int, with_shared: bool = False) -> str:
    half = tokens // 2
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
    sums = ", ".join(f"%{i}" for i in range(half))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16"

    def product(name: str, kind: str, left: str, inputs: str, x: int, flags: str) -> str:
        return f"""__device__ __forceinline__ void {name}(float (&d)[{half}], {kind}, u64 x) {{
  asm volatile("{instruction} {{{sums}}}, {left}, %{x}, {flags};"
               : {outputs}
               : {inputs}, "l"(x));
}}"""

    names = ", ".join(f"%{half + i}" for i in range(4))
    values = ", ".join(f'"r"(a[{i}])' for i in range(4))
    made = product("wgmma", "const u32 (&a)[4]", f"{{{names}}}", values, half + 4, "1, 1, 1, 0")
    if with_shared:
        made += "\n\n" + product("wgmma_shared", "u64 a", f"%{half}", '"l"(a)', half + 1, "1, 1, 1, 0, 0")
    return made


@functools.cache
def _exchange(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Sums that blocks hand over, their flags, and the same of X A^T; a launch leaves the flags at zero."""
    shapes = [(tokens * 64 * p * g * b, b) for tokens in TOKENS for p, g, b in SHAPES[tokens]]
    sizes = [count_multiprocessors(device) * max(of) for of in zip(*shapes, strict=True)]
    # vLLM changes the default dtype while it loads.
    sums = torch.empty(sizes[0], dtype=torch.float32, device=device)
    low = torch.empty(_LOW_BYTES // 4, dtype=torch.float32, device=device)
    counters = torch.zeros(sizes[1] + 2, dtype=torch.int32, device=device)
    return sums, counters[2:], low, counters


def prepare(launches: Iterable[tuple[int, Launch]]) -> None:
    """Compile what these launches need beside each other, not each on its first use, and make the memory they share.

    Args:
        launches: An entry of TOKENS and a launch for it, each.
    """
    device = torch.cuda.current_device()
    torch.cuda.synchronize()  # the device has a context, which each thread makes its own
    with ThreadPoolExecutor(initializer=lambda: (torch.cuda.set_device(device), torch.cuda.synchronize())) as threads:
        # In a thread, since this one may be allocating in memory that sleep mode takes away, or capturing a graph.
        shared = threads.submit(_exchange, torch.device("cuda", device))
        adapters = threads.submit(low_rank_kernel)
        kernels = {(rows_at_a_time(tokens, launch), launch) for tokens, launch in launches}
        # Without an adapter, or with more rows of A than a block takes, X A^T is gathered.
        kernels |= {(rows, launch._replace(intermediate=GATHERED)) for rows, launch in kernels}
        list(threads.map(lambda each: _kernel(*each), kernels))
        adapters.result()
        shared.result()
    torch.cuda.synchronize()


def _kernel(tokens: int, launch: Launch) -> Kernel:
    return _compile(tokens, launch._replace(split_k=min(launch.split_k, 1)))


@functools.cache
def _compile(tokens: int, launch: Launch) -> Kernel:
    return Kernel(source(tokens, launch), "w4a16_matmul")
