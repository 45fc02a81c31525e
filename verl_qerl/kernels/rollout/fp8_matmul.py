"""X W^T of two E4M3 matrices with the product of one adapter in the same launch, in Triton on Hopper.

    y[m, n] = a[m] * b[n] * sum_k x[m, k] w[n, k] + bf16(low[m, member of n]) B[n]^T + bias[n]

Sums of FP8 products are kept in the tensor cores' accumulators to the end, which hold less than float32's precision;
vLLM's own FP8 kernels do the same. The adapter is multiplied in bf16 and added to the scaled sums in float32. Sums are
taken in a fixed order, so the same input gives the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from verl_qerl.kernels.rollout import launch as launching
from verl_qerl.kernels.rollout.launch import count_multiprocessors
from verl_qerl.kernels.rollout.w4a16_matmul import RANKS

MULTIPLE = 64  # of N, and of the columns of each member
_GROUP = 8  # tiles along N that programs take before they go to other rows


class Launch(NamedTuple):
    """How a product is launched.

    Attributes:
        rows: Of y that a program owns.
        columns: Of y that it owns; one member's.
        depth: Columns of x and w that it multiplies at a time.
        warps: Of a program.
        stages: Of depth that are under way at a time.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Low(NamedTuple):
    """X A^T of an adapter and what it is multiplied by.

    Attributes:
        low: [M, L R] bf16, zero in rows without the adapter.
        b: [N, R] bf16, R of RANKS.
        members: Of `kernels.rollout.lora.member_of_tile`.
    """

    low: torch.Tensor
    b: torch.Tensor
    members: torch.Tensor


def can_add(b: torch.Tensor, members: torch.Tensor) -> bool:
    """Whether the kernel takes an adapter; arguments as of `Low`."""
    return b.shape[1] in RANKS and b.shape[0] // len(members) % MULTIPLE == 0


def candidates(M: int) -> list[Launch]:
    """What may be fast for M rows."""
    found = [Launch(64, 64, 128, 4, 4), Launch(64, 64, 256, 4, 3), Launch(64, 128, 128, 4, 3)]
    found += [Launch(64, 128, 128, 4, 4), Launch(64, 128, 256, 4, 3)]
    if M > 64:
        found += [
            Launch(128, 64, 128, 4, 4),
            Launch(128, 64, 128, 8, 4),
            Launch(128, 128, 128, 4, 3),
            Launch(128, 128, 128, 8, 3),
        ]
        found += [Launch(128, 128, 128, 8, 4)]
    if M > 128:
        found += [Launch(256, 64, 128, 8, 4), Launch(256, 128, 128, 8, 3)]
    return found


def guess_launch(M: int, N: int, multiprocessors: int) -> Launch:
    """The largest tile that gives each multiprocessor one at least, else the smallest."""
    tried = (Launch(128, 128, 128, 8, 3), Launch(64, 128, 128, 4, 4), Launch(64, 64, 128, 4, 4))
    for launch in tried[M <= 64 :]:
        if triton.cdiv(M, launch.rows) * triton.cdiv(N, launch.columns) * 5 >= multiprocessors * 4:
            return launch
    return tried[-1]


def fp8_matmul(
    x: torch.Tensor,
    of_rows: torch.Tensor,
    weight: torch.Tensor,
    of_columns: torch.Tensor,
    bias: torch.Tensor | None = None,
    low: Low | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Multiply.

    Args:
        x: [M, K] float8_e4m3fn, contiguous.
        of_rows: a, [M, 1] float32.
        weight: w, [N, K] float8_e4m3fn, contiguous, K % 16 == 0, N % 64 == 0.
        of_columns: b, [N, 1] float32.
        bias: [N] bf16 or None.
        low: One that `can_add` accepts, or None.
        launch: None guesses.

    Returns:
        [M, N] bf16.
    """
    M, N = x.shape[0], weight.shape[0]
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    if M == 0:
        return y
    launch = launch or guess_launch(M, N, count_multiprocessors(x.device))
    if (N // len(low.members) if low else N) % launch.columns:  # a tile is of one member
        launch = launch._replace(columns=MULTIPLE)
    run(x, of_rows, weight, of_columns, bias, low, launch, y)
    return y


def run(
    x: torch.Tensor,
    of_rows: torch.Tensor,
    weight: torch.Tensor,
    of_columns: torch.Tensor,
    bias: torch.Tensor | None,
    low: Low | None,
    launch: Launch,
    y: torch.Tensor,
) -> torch.Tensor:
    """Start the Triton kernel; arguments as of `fp8_matmul`, y is written."""
    (M, K), N = x.shape, weight.shape[0]
    rows, columns, depth, warps, stages = launch
    x_rows, w_rows = (
        TensorDescriptor.from_tensor(x, [rows, depth]),
        TensorDescriptor.from_tensor(weight, [columns, depth]),
    )
    of_low, b, members = low or (y[:, :0], y[:, :0], y[:1])
    rank, early = b.shape[1], x.is_cuda and launching.programmatic_launch
    shape: Any = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "GROUP": _GROUP, "HAS_BIAS": bias is not None}
    shape |= {"RANK": max(16, triton.next_power_of_2(rank)) if low else 0, "num_warps": warps, "num_stages": stages}
    shape |= {"EARLY": early, "launch_pdl": early}
    tensors = (of_rows, of_columns, y if bias is None else bias, of_low, b, members, y)
    sizes = (M, N, K, N // len(members), of_low.shape[1], rank)
    _matmul_kernel[triton.cdiv(M, rows) * triton.cdiv(N, columns),](x_rows, w_rows, *tensors, *sizes, **shape)
    return y


@triton.jit(do_not_specialize=["M"])  # a batch of any size runs what another has compiled
def _matmul_kernel(
    x_rows,
    w_rows,
    of_rows_ptr,
    of_columns_ptr,
    bias_ptr,
    low_ptr,
    b_ptr,
    members_ptr,
    y_ptr,
    M,
    N,
    K,
    tile,
    columns,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:  # as start_next and await_inputs of grid.cuh
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Programs that run at the same time share weights and rows.
    row_tiles = tl.cdiv(M, ROWS)
    column_tiles = tl.cdiv(N, COLUMNS)
    group = tl.program_id(0) // (GROUP * row_tiles)
    within = tl.program_id(0) % (GROUP * row_tiles)
    wide = tl.minimum(column_tiles - group * GROUP, GROUP)
    first_m = within // wide * ROWS
    first_n = (group * GROUP + within % wide) * COLUMNS

    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, K, DEPTH):
        x = x_rows.load([first_m, k])
        w = w_rows.load([first_n, k])
        total = tl.dot(x, w.T, total)

    m = first_m + tl.arange(0, ROWS)
    n = first_n + tl.arange(0, COLUMNS)
    in_rows = m < M
    total *= tl.load(of_rows_ptr + m, mask=in_rows, other=0.0)[:, None]
    total *= tl.load(of_columns_ptr + n)[None, :]
    if RANK > 0:
        r = tl.arange(0, RANK)
        first_r = tl.load(members_ptr + first_n // tile) * rank
        of_low = low_ptr + m[:, None].to(tl.int64) * columns + first_r + r[None, :]
        low = tl.load(of_low, mask=in_rows[:, None] & (r < rank)[None, :], other=0.0)
        b = tl.load(b_ptr + n[None, :] * rank + r[:, None], mask=(r < rank)[:, None], other=0.0)
        total = tl.dot(low, b, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n)[None, :].to(tl.float32)
    tl.store(y_ptr + m[:, None].to(tl.int64) * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=in_rows[:, None])
