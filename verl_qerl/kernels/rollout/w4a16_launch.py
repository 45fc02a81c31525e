"""Launch parameters of `kernels.rollout.w4a16_matmul`, and a model that guesses the fastest ones."""

from typing import NamedTuple

# Rows that kernels are compiled for. 144 is half of 288: 256 sequences of a rollout, one of which has just begun and
# brings the last tokens of its prompt.
TOKENS = (8, 16, 32, 64, 96, 128, 144, 192, 256)
_FEW = ((2, 1, 2), (2, 1, 3), (2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 4, 1), (1, 5, 1))
_MANY = ((2, 2, 1), (1, 3, 1), (1, 2, 1), (1, 1, 2))
# `warp_tiles`, `warpgroups` and `blocks_per_sm` of Launch whose accumulators stay in registers, by the rows of a thread
# block.
SHAPES = {
    8: _FEW,
    16: _FEW,
    32: ((2, 1, 2), (2, 2, 1), (2, 3, 1), (2, 4, 1), (1, 5, 1)),
    64: ((2, 1, 2), (2, 2, 1), (2, 3, 1), (1, 5, 1), (1, 2, 2), (1, 4, 1)),
    72: _MANY,
    96: _MANY,
    128: _MANY,
    144: ((2, 2, 1), (1, 3, 1), (1, 2, 1)),
    192: ((1, 3, 1), (1, 2, 1)),
    256: ((1, 2, 1),),
}
MULTIPLE = 64  # of N and K: of the layout of a weight, and what a kernel takes of K at a time
_MULTICAST_ROWS = 129  # rows from which a cluster of two thread blocks shares X by multicast, with stream-K
# `fixed` and `step` of `launch_candidates`; 8, 72, 96, 144, 192 and 256 are extrapolated.
_MICROSECONDS = {
    8: (4.5, 0.33),
    16: (4.5, 0.34),
    32: (5.0, 0.38),
    64: (6.0, 0.48),
    72: (6.3, 0.5),
    96: (7.3, 0.56),
    128: (8.7, 0.65),
    144: (8.9, 0.73),
    192: (9.5, 0.97),
    256: (10.0, 1.28),
}
_LEAST_STEP = 0.2
_EXCHANGE = 1.0  # microseconds
_ALONE = 1.2  # where a warp waits for products that are short, or has no other warpgroup beside it
_MULTIPROCESSORS = (16,) * 6 + (18,) * 2  # of an H200, by the groups that a cluster fits into
H200_MULTIPROCESSORS = sum(_MULTIPROCESSORS)
STREAM_K = 0  # `split_k` of Launch
GATHERED, EACH = 0, 1  # `intermediate` of Launch
# Most for which the kernel makes X A^T itself; where it is gathered, blocks that add it take the sum of all parts, of
# more rows too much to read. To add them up once for all blocks inside the launch was slower than a launch before, from
# 128 rows on.
INTERMEDIATE_ROWS = 64
_OWN_ROWS = 64  # most rows of A that a thread block makes X A^T of: those of one wgmma
_SPLITS = (1, 2, 3, 4, 6, 8)  # clusters of 5 and 7 were always slower


class Launch(NamedTuple):
    """Launch parameters of one product.

    Attributes:
        warp_tiles: Tiles of 16 columns of each warp: 1 or 2.
        warpgroups: Warpgroups of a thread block, without the one that loads.
        split_k: Thread blocks of a cluster that share K, up to 8; or STREAM_K: the steps of all output tiles are laid
            end to end, and each block gets an equal share of them.
        intermediate: How the LoRA intermediate X A^T of up to 64 rows is computed. GATHERED: the first blocks share
            the work, the others wait for it. EACH: every block computes it of its own part of K, where `own_rows` gives
            it rows of A; not with STREAM_K.
    """

    warp_tiles: int
    warpgroups: int
    split_k: int
    blocks_per_sm: int
    intermediate: int = GATHERED

    @property
    def columns(self) -> int:
        """Columns of a thread block."""
        return 64 * self.warp_tiles * self.warpgroups


def multicast_blocks(tokens: int) -> int:
    """Thread blocks of the cluster that loads X once by multicast, for an entry of TOKENS: 1 or 2."""
    return 2 if tokens >= _MULTICAST_ROWS else 1


def rows_at_a_time(tokens: int, launch: Launch) -> int:
    """Rows of a thread block: an entry of TOKENS, or half of it where split-K takes the place of multicast."""
    return tokens if launch.split_k == STREAM_K or multicast_blocks(tokens) == 1 else tokens // 2


def can_make_intermediate(tokens: int, launch: Launch) -> bool:
    """Whether every thread block may compute its own X A^T, for an entry of TOKENS."""
    return launch.split_k != STREAM_K and tokens <= INTERMEDIATE_ROWS


def both_ways(tokens: int, launch: Launch) -> tuple[Launch, ...]:
    """A launch with each way to compute X A^T that it may have, for an entry of TOKENS."""
    ways = (GATHERED, EACH) if can_make_intermediate(tokens, launch) else (GATHERED,)
    return tuple(launch._replace(intermediate=way) for way in ways)


def own_rows(launch: Launch, rank: int, members: int, per_entry: int) -> int:
    """Rows of A whose X A^T a thread block computes itself; 0 where it is gathered.

    Args:
        rank: Rows of A of a member.
        per_entry: Columns that surely belong to one member.
    """
    # A warpgroup has columns of one member. Where members begin is known to the GPU alone.
    of_block = 1 if per_entry % launch.columns == 0 else min(members, launch.warpgroups)
    return of_block * rank if launch.intermediate == EACH and of_block * rank <= _OWN_ROWS else 0


def launch_candidates(N: int, K: int, tokens: int) -> list[Launch]:
    """Launches for a weight [N, K] and an entry of TOKENS, the most promising first.

    By a model of the time, fitted to what was measured on an H200: each wave of thread blocks begins and ends in
    `fixed` microseconds and takes `step` for each 64 of K and 256 columns of a multiprocessor.
    """
    steps = K // MULTIPLE

    def cost(launch: Launch) -> float:
        rows = rows_at_a_time(tokens, launch)
        (fixed, step), beside = _MICROSECONDS[rows], multicast_blocks(rows)
        stream_k = launch.split_k == STREAM_K
        tiles = -(-N // (launch.columns * beside)) * beside * (tokens // rows)
        parts = tiles * (1 if stream_k else launch.split_k)
        together = launch.blocks_per_sm if stream_k else min(launch.blocks_per_sm, -(-parts // H200_MULTIPROCESSORS))
        alone = (launch.warp_tiles == 1 and rows <= 64) or launch.warpgroups * together == 1
        each = max(_LEAST_STEP, step * launch.columns * together / 256 * (_ALONE if alone else 1))
        if stream_k:
            return fixed + _EXCHANGE + -(-tiles * steps // (H200_MULTIPROCESSORS * launch.blocks_per_sm)) * each
        # A cluster stays within one group of multiprocessors.
        at_once = sum(size * launch.blocks_per_sm // launch.split_k for size in _MULTIPROCESSORS)
        return -(-tiles // at_once) * (fixed + -(-steps // launch.split_k) * each)

    found = [Launch(p, g, STREAM_K, b) for p, g, b in SHAPES[tokens]]
    clusters = SHAPES[tokens // multicast_blocks(tokens)]
    found += [Launch(p, g, split, b) for p, g, b in clusters for split in _SPLITS if split <= steps]
    return sorted(found, key=cost)


def guess_launch(N: int, K: int, M: int) -> Launch:
    """A launch for M rows of a shape that was not measured."""
    return for_rows(launch_candidates(N, K, padded_rows(M))[0], M)


def for_rows(launch: Launch, M: int) -> Launch:
    """The launch itself, or stream-K where there are more rows than a split-K launch was chosen for."""
    return launch if TOKENS[-1] >= M or launch.split_k == STREAM_K else Launch(1, 2, STREAM_K, 1)


def padded_rows(rows: int) -> int:
    """The entry of TOKENS that as many rows run as; those of the last two take any number, as many at a time."""
    at_once = -(-rows // max(1, -(-rows // TOKENS[-1])))
    return next(tokens for tokens in TOKENS if at_once <= tokens)


def registers(tokens: int, launch: Launch) -> int:
    """What a multiplying thread gets when the helpers keep `helper_registers` each; 0 leaves all as they start."""
    if not wants_registers(tokens, launch):
        return 0
    at_start = 512 // (launch.blocks_per_sm * (launch.warpgroups + 1)) // 8 * 8
    return min(240, (at_start * (launch.warpgroups + 1) - helper_registers(launch)) // launch.warpgroups // 8 * 8)


def helper_registers(launch: Launch) -> int:
    """What a helper keeps: where each block makes X A^T with its multiplying warps, helpers only fill the ring."""
    return 40 if launch.intermediate == EACH else 80


def wants_registers(tokens: int, launch: Launch) -> bool:
    """Whether warpgroups that multiply take registers from the one that does not."""
    # The sums of X A^T beside the others, in threads that have few registers because they are many.
    return tokens * launch.warp_tiles > 128 or (launch.intermediate == EACH and launch.warpgroups > 2)


def box_columns(columns: int) -> int:
    """Columns that the copy engine takes at a time."""
    return next(box for box in (256, 192, 128, 64) if columns % box == 0)
