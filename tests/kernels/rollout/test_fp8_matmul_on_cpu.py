"""The FP8 product with an adapter: in Triton's interpreter against float64, and compiled for Hopper."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verl_qerl.formats.fp8 import FP8
from verl_qerl.kernels.rollout import fp8_matmul
from verl_qerl.kernels.rollout.fp8_matmul import Launch, can_add, candidates, guess_launch
from verl_qerl.kernels.rollout.lora import member_of_tile

SMALL = Launch(64, 64, 32, 4, 2)
# Rows, columns of each member, K, rank of the adapter (0: none), bias, launch.
CASES = [
    (5, (64, 64), 96, 0, False, SMALL),
    (70, (64, 128), 80, 0, True, SMALL),
    (70, (64, 128), 96, 16, True, SMALL),
    (130, (128, 256, 128), 160, 8, False, Launch(64, 128, 32, 4, 2)),
    (130, (1280,), 64, 32, True, Launch(128, 128, 64, 8, 2)),  # two groups of tiles
]


def build(case: tuple) -> tuple:
    """Arguments of `run`, y full of NaN; numbers of the adapter and y in half: the interpreter has no bf16 products."""
    rows, members, K, rank, has_bias, launch = case
    N = sum(members)
    generator = torch.Generator().manual_seed(rows + N + K)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    (x, of_rows), (w, of_columns) = (FP8.quantize_rows(random(size, K).float()) for size in (rows, N))
    low = None
    if rank:
        low = (random(rows, len(members) * rank), random(N, rank), member_of_tile(members, "cpu"))
    bias = random(N) if has_bias else None
    return x, of_rows, w, of_columns, bias, low, tuple(launch), torch.full((rows, N), torch.nan, dtype=torch.half)


def test_the_kernel_gives_the_products_and_writes_everything(interpreted):
    given = [build(case) for case in CASES]
    found = interpreted(fp8_matmul.__name__, given, "run")
    for (_, members, _, rank, *_), (x, of_rows, w, of_columns, bias, low, _, _), y in zip(
        CASES, given, found, strict=True
    ):
        expected = (x.double() * of_rows) @ (w.double() * of_columns).T
        if low is not None:
            parts = zip(low[0].double().split(rank, 1), low[1].double().split(members), strict=True)
            expected += torch.cat([part @ b.T for part, b in parts], 1)
        expected += 0 if bias is None else bias.double()
        torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-2)


def compiled(launch: Launch, rank: int) -> int:
    """Bytes of shared memory that a program takes on Hopper, or an error of the compiler."""
    kernel = fp8_matmul._matmul_kernel
    constants = {"ROWS": launch.rows, "COLUMNS": launch.columns, "DEPTH": launch.depth, "GROUP": 8}
    constants |= {"RANK": max(16, rank) if rank else 0, "HAS_BIAS": True, "EARLY": True}
    types = {"of_rows_ptr": "*fp32", "of_columns_ptr": "*fp32", "members_ptr": "*i32"}
    types |= {
        name: f"tensordesc<fp8e4nv[{size},{launch.depth}]>"
        for name, size in (("x_rows", launch.rows), ("w_rows", launch.columns))
    }
    signature = {
        key: "constexpr" if key in constants else types.get(key, "*bf16" if key.endswith("_ptr") else "i32")
        for key in kernel.arg_names
    }
    whole = {
        (i,): [["tt.divisibility", 16]]
        for i, (key, kind) in enumerate(signature.items())
        if key not in {*constants, "M"} and not kind.startswith("tensordesc")
    }
    source = ASTSource(kernel, signature, constants, whole)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.metadata.shared


@pytest.mark.parametrize("launch", candidates(512), ids=str)
def test_every_candidate_compiles_for_hopper_and_fits(launch):
    assert compiled(launch, 32) <= 227 << 10


def test_small_products_get_small_tiles():
    assert guess_launch(256, 37888, 132) == Launch(128, 128, 128, 8, 3)
    assert guess_launch(256, 3584, 132).rows == 64
    assert guess_launch(64, 3584, 132) == Launch(64, 64, 128, 4, 4)
    assert all(guess_launch(M, N, 132) in candidates(M) for M in (64, 100, 256, 8192) for N in (896, 4608, 37888))


@pytest.mark.parametrize(
    ("rank", "tile", "taken"), [(32, 128, True), (128, 64, True), (256, 128, False), (32, 32, False)]
)
def test_which_adapters_it_adds(rank, tile, taken):
    assert can_add(torch.zeros(256, rank), torch.zeros(256 // tile, dtype=torch.int32)) is taken
