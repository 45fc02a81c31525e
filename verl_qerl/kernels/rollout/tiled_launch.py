"""How the work of `kernels.rollout.tiled_matmul` can be dealt out, and a guess at which way is the fastest."""

from typing import NamedTuple

# Rows that kernels are compiled for. 144 is half of 288: 256 sequences of a rollout, one of which has just begun and
# brings the last tokens of its prompt.
TOKENS = (8, 16, 32, 64, 96, 128, 144, 192, 256)
_FEW = ((2, 1, 2), (2, 1, 3), (2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 4, 1), (1, 5, 1), (4, 1, 2))
_MANY = ((2, 2, 1), (1, 3, 1), (1, 2, 1), (1, 1, 2))
# `pieces`, `groups` and `blocks` of Launch for which the sums stay in registers, by the rows of a thread block.
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
_TWINS = 129  # rows from which two thread blocks share X, in a stream
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
STREAM = 0  # `split` of Launch
GATHERED, EACH = 0, 1  # `low` of Launch
# Most for which the kernel makes X A^T itself; where it is gathered, blocks that add it take the sum of all parts, of
# more rows too much to read. To add them up once for all blocks inside the launch was slower than a launch before, from
# 128 rows on.
LOW_ROWS = 64
_OWN_ROWS = 64  # most rows of A that a thread block makes X A^T of: those of one wgmma
_SPLITS = (1, 2, 3, 4, 6, 8)  # clusters of 5 and 7 were always slower


class Launch(NamedTuple):
    """How the work is dealt out.

    Attributes:
        pieces: Times 16 columns for each warp: 1, 2 or 4.
        groups: Warpgroups of a thread block.
        split: Thread blocks that share K, a cluster of up to 8. STREAM: every block gets the same number of steps of
            all columns, whatever their sum.
        blocks: Thread blocks of a multiprocessor.
        low: How X A^T is made of up to 64 rows. GATHERED: the first blocks share the work, the others wait for it.
            EACH: every block makes it of its own part of K, if `own_rows` gives it rows of A; no stream does.
    """

    pieces: int
    groups: int
    split: int
    blocks: int
    low: int = GATHERED

    @property
    def columns(self) -> int:
        """Columns of a thread block."""
        return 64 * self.pieces * self.groups


def twins(tokens: int) -> int:
    """Thread blocks that take columns side by side and copy X for each other, for an entry of TOKENS: 1 or 2."""
    return 2 if tokens >= _TWINS else 1


def rows_at_a_time(tokens: int, launch: Launch) -> int:
    """Rows that a thread block takes at a time: an entry of TOKENS, or half of it where twins would share K."""
    return tokens if launch.split == STREAM or twins(tokens) == 1 else tokens // 2


def can_make_low(tokens: int, launch: Launch) -> bool:
    """Whether every thread block may make X A^T, for an entry of TOKENS."""
    return launch.split != STREAM and tokens <= LOW_ROWS


def both_ways(tokens: int, launch: Launch) -> tuple[Launch, ...]:
    """A launch with each way to make X A^T that it may have, for an entry of TOKENS."""
    ways = (GATHERED, EACH) if can_make_low(tokens, launch) else (GATHERED,)
    return tuple(launch._replace(low=low) for low in ways)


def own_rows(launch: Launch, rank: int, members: int, per_entry: int) -> int:
    """Rows of A of which a thread block makes X A^T itself; 0 where it is gathered.

    Args:
        launch: Of the product.
        rank: Rows of A of a member.
        members: Of the linear.
        per_entry: Columns that surely belong to one member.
    """
    # A warpgroup has columns of one member. Where members begin is known to the GPU alone.
    of_block = 1 if per_entry % launch.columns == 0 else min(members, launch.groups)
    return of_block * rank if launch.low == EACH and of_block * rank <= _OWN_ROWS else 0


def launch_candidates(N: int, K: int, tokens: int) -> list[Launch]:
    """Launches for a weight [N, K] and an entry of TOKENS, the most promising first.

    By a model of the time, fitted to what was measured on an H200: each wave of thread blocks begins and ends in
    `fixed` microseconds and takes `step` for each 64 of K and 256 columns of a multiprocessor.
    """
    steps = K // MULTIPLE

    def cost(launch: Launch) -> float:
        rows = rows_at_a_time(tokens, launch)
        (fixed, step), beside = _MICROSECONDS[rows], twins(rows)
        streams = launch.split == STREAM
        tiles = -(-N // (launch.columns * beside)) * beside * (tokens // rows)
        parts = tiles * (1 if streams else launch.split)
        together = launch.blocks if streams else min(launch.blocks, -(-parts // H200_MULTIPROCESSORS))
        alone = (launch.pieces == 1 and rows <= 64) or launch.groups * together == 1
        each = max(_LEAST_STEP, step * launch.columns * together / 256 * (_ALONE if alone else 1))
        if streams:
            return fixed + _EXCHANGE + -(-tiles * steps // (H200_MULTIPROCESSORS * launch.blocks)) * each
        # A cluster stays within one group of multiprocessors.
        at_once = sum(size * launch.blocks // launch.split for size in _MULTIPROCESSORS)
        return -(-tiles // at_once) * (fixed + -(-steps // launch.split) * each)

    found = [Launch(p, g, STREAM, b) for p, g, b in SHAPES[tokens]]
    clusters = SHAPES[tokens // twins(tokens)]
    found += [Launch(p, g, split, b) for p, g, b in clusters for split in _SPLITS if split <= steps]
    return sorted(found, key=cost)


def guess_launch(N: int, K: int, M: int) -> Launch:
    """A launch for M rows of a shape that was not measured."""
    return for_rows(launch_candidates(N, K, padded_rows(M))[0], M)


def for_rows(launch: Launch, M: int) -> Launch:
    """The launch itself, or a stream for more rows than a launch that shares K was chosen for: they fill the GPU."""
    return launch if TOKENS[-1] >= M or launch.split == STREAM else Launch(1, 2, STREAM, 1)


def padded_rows(rows: int) -> int:
    """The entry of TOKENS that as many rows run as; those of the last two take any number, as many at a time."""
    at_once = -(-rows // max(1, -(-rows // TOKENS[-1])))
    return next(tokens for tokens in TOKENS if at_once <= tokens)


def registers(tokens: int, launch: Launch) -> int:
    """What a multiplying thread gets when the helpers keep `helper_registers` each; 0 leaves all as they start."""
    if not wants_registers(tokens, launch):
        return 0
    at_start = 512 // (launch.blocks * (launch.groups + 1)) // 8 * 8
    return min(240, (at_start * (launch.groups + 1) - helper_registers(launch)) // launch.groups // 8 * 8)


def helper_registers(launch: Launch) -> int:
    """What a helper keeps: where each block makes X A^T with its multiplying warps, helpers only fill the ring."""
    return 40 if launch.low == EACH else 80


def wants_registers(tokens: int, launch: Launch) -> bool:
    """Whether warpgroups that multiply take registers from the one that does not."""
    # The sums of X A^T beside the others, in threads that have few registers because they are many.
    return tokens * launch.pieces > 128 or (launch.low == EACH and launch.groups > 2)


def box_columns(columns: int) -> int:
    """Columns that the copy engine takes at a time."""
    return next(box for box in (256, 192, 128, 64) if columns % box == 0)
