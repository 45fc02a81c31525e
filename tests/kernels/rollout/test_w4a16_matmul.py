"""The kernel on a GPU, against float64 and the separate low-rank product."""

import functools
import itertools

import pytest
import torch
from qerl_testing import load_beside, random_packed_weight, rms_error_ratio

from verl_qerl.formats import reference
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.rollout import w4a16_matmul as module
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.repacking import repack
from verl_qerl.kernels.rollout.w4a16_launch import (
    EACH,
    SHAPES,
    STREAM_K,
    Launch,
    guess_launch,
    padded_rows,
    rows_at_a_time,
)
from verl_qerl.kernels.rollout.w4a16_matmul import Adapter, _own_rows, can_fuse, w4a16_matmul

pytestmark = pytest.mark.gpu
poison = load_beside(__file__, "unwritten").poison

ROWS = [1, 7, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 144, 191, 193, 256, 257, 288, 400, 1000]
# (K, columns of the members): one step of K and one tile; odd counts of both; linears of a 7B, a 14B and a 32B.
LINEARS = [
    (64, (64,)),
    (192, (128, 64)),
    (3584, (3584, 512, 512)),
    (18944, (3584,)),
    (3584, (18944, 18944)),
    (5120, (5120, 1024, 1024)),
    (13824, (5120,)),
    (5120, (27648, 27648)),
]
LAUNCHES = [
    Launch(p, g, split, b) for p, g, b in sorted(set(sum(SHAPES.values(), ()))) for split in (STREAM_K, 1, 5, 8)
]
ASIDE = "such a kernel is not compiled"


def exists(launch: Launch, rows: int) -> bool:
    # Its sums fit into registers.
    return (launch.warp_tiles, launch.warpgroups, launch.blocks_per_sm) in SHAPES[
        rows_at_a_time(padded_rows(rows), launch)
    ]


@functools.lru_cache(maxsize=2)
def build(
    K: int, slices: tuple[int, ...], seed: int = 0, device: str = "cuda"
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Tensors of `w4a16_matmul`, and the weight in float64."""
    weight = random_packed_weight(sum(slices), K, seed, device)
    return repack(weight), reference.dequantize(weight).double()


def assert_rounded_once(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Each value is the product rounded once to bf16; float32 sums of K products are off by less than what is added.

    The norm of that error is 1.66e-3 of the result's for a mantissa of 8 bits, as of cuBLAS.
    """
    error = (out.double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all(), error.max()
    assert_rms(out, expected)


def assert_rms(out: torch.Tensor, expected: torch.Tensor, most: float = 2e-3) -> None:
    """Of many values: of 64, exact ones that are rounded are above this in one draw of thirty."""
    assert out.numel() < 448 or rms_error_ratio(out, expected) < most


@pytest.mark.parametrize("linear", LINEARS, ids=str)
def test_is_the_product_rounded_once(linear):
    tensors, dense = build(*linear)
    bias = torch.randn(dense.shape[0], device="cuda").bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, linear[0], device="cuda").bfloat16()
        poison(*x.shape[:1], dense.shape[0])
        out = w4a16_matmul(x, *tensors, bias)
        assert_rounded_once(out, x.double() @ dense.T + bias.double())
        for _ in range(5):
            assert torch.equal(out, w4a16_matmul(x, *tensors, bias))
        assert_rounded_once(w4a16_matmul(x, *tensors), x.double() @ dense.T)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("rows", [5, 40, 128, 140, 180, 250, 272])
def test_every_launch_gives_the_product(rows, launch):
    if not exists(launch, rows):
        pytest.skip(ASIDE)
    tensors, dense = build(3584, (3584, 512, 512))
    x = torch.randn(rows, 3584, device="cuda").bfloat16()
    poison(rows, dense.shape[0])
    assert_rounded_once(w4a16_matmul(x, *tensors, launch=launch), x.double() @ dense.T)


def test_every_code_and_every_normal_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    scale = torch.arange(128, dtype=torch.uint8).clamp(8, 126)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    weight = nvfp4_weight(codes, scale, torch.tensor(2.0**-12)).to("cuda")
    x, tensors = torch.eye(512, device="cuda").bfloat16(), repack(weight)
    for rows in (128, 512):
        columns = [w4a16_matmul(part.contiguous(), *tensors) for part in x.split(rows)]
        assert torch.equal(torch.cat(columns).T, reference.dequantize(weight))


def build_adapter(K: int, slices: tuple[int, ...], rank: int, rows: int, device: str = "cuda") -> Adapter:
    """One that every second token has, with room for two tokens more."""
    generator = torch.Generator(device).manual_seed(rank)
    a = (torch.randn(len(slices) * rank, K, device=device, generator=generator) * K**-0.5).bfloat16()
    b = torch.randn(sum(slices), rank, device=device, generator=generator).bfloat16()
    slots = torch.zeros(rows + 2, dtype=torch.int64, device=device)
    slots[1::2] = -1
    return Adapter(a, b, member_of_tile(slices, device), slots)


def own_parts(launch: Launch) -> int:
    """Of K, whose low rank each thread block rounds by itself; 0 where that of all of K is rounded."""
    return launch.split_k if launch.intermediate == EACH else 0


def assert_adapted(
    out: torch.Tensor, x: torch.Tensor, base: torch.Tensor, adapter: Adapter, slices, parts: int = 0
) -> None:
    """`base` and the adapter's product, whose low rank is rounded to bf16 once and then maybe to its neighbour.

    With `own_parts` the roundings are those of the parts, which may be larger than their sum. All together they are as
    large as that of one, and beside another low: where the adapter is nearly all, a norm of both is 1.66e-3 times the
    root of 2, if there are many of them.
    """
    rank, steps = adapter.b.shape[1], x.shape[1] // 64
    cuts = [64 * (steps * part // max(parts, 1)) for part in range(max(parts, 1) + 1)]
    lows = [x[:, i:j].double() @ adapter.a[:, i:j].double().T for i, j in itertools.pairwise(cuts)]
    has_adapter = adapter.slots[: len(x), None] >= 0
    low = (sum(lows) if parts else lows[0].bfloat16().double()) * has_adapter
    rounded = sum(part.abs() for part in lows) * has_adapter

    def times_b(low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = zip(low.split(rank, 1), b.double().split(slices), strict=True)
        return torch.cat([part @ rows_of_b.T for part, rows_of_b in pairs], 1)

    expected = base + times_b(low, adapter.b)
    error = (out.double() - expected).abs()
    # A neighbour in bf16 is up to 2**-7 away, which counts where one of the rank is nearly all that is added.
    slack = (2**-8 if parts else 2**-7) * times_b(rounded, adapter.b.abs())
    assert (error <= 2**-8 * expected.abs() + slack + 1e-5 * expected.abs().max()).all(), error.max()
    if not parts or low.numel() >= 448:
        assert_rms(out, expected, 2.6e-3 if parts else 2e-3)
    added = expected - base
    assert added[0].any()
    assert not added[1::2].any()


def assert_flags_are_left_at_zero(device: torch.device | None = None) -> None:
    _, flags, _, done = module._exchange(device or torch.device("cuda", torch.cuda.current_device()))
    assert not flags.any()
    assert not done.any()


@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("linear", [LINEARS[1], LINEARS[2], LINEARS[3], LINEARS[4]], ids=str)
def test_the_adapter_is_added(linear, rank):
    K, slices = linear
    tensors, dense = build(K, slices)
    for rows in (1, 13, 17, 32, 50, 64, 101, 128, 144, 200, 256, 272, 700):
        x = torch.randn(rows, K, device="cuda").bfloat16()
        bias = torch.randn(sum(slices), device="cuda").bfloat16()
        adapter = build_adapter(K, slices, rank, rows)
        launch = guess_launch(sum(slices), K, rows)
        if not can_fuse(*adapter[:3], launch):
            launch = Launch(1, 2, 1, 1)
        assert can_fuse(*adapter[:3], launch)
        poison(rows, sum(slices))
        out = w4a16_matmul(x, *tensors, bias, adapter, launch)
        assert_adapted(out, x, x.double() @ dense.T + bias.double(), adapter, slices)
        for _ in range(5):
            assert torch.equal(out, w4a16_matmul(x, *tensors, bias, adapter, launch))
    assert_flags_are_left_at_zero()


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("rows", [5, 40, 128, 140, 180, 250, 272])
def test_every_launch_adds_the_adapter(rows, launch):
    K, slices = LINEARS[2]
    if not exists(launch, rows):
        pytest.skip(ASIDE)
    tensors, dense = build(K, slices)
    x = torch.randn(rows, K, device="cuda").bfloat16()
    adapter = build_adapter(K, slices, 32, rows)
    out = w4a16_matmul(x, *tensors, None, adapter, launch)
    assert_adapted(out, x, x.double() @ dense.T, adapter, slices)
    assert_flags_are_left_at_zero()


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize("linear", [LINEARS[1], LINEARS[2], LINEARS[3], LINEARS[6]], ids=str)
def test_every_block_makes_the_low_rank(linear, rank):
    K, slices = linear
    tensors, dense = build(K, slices)
    for rows, shape in itertools.product(
        (1, 13, 17, 32, 50, 64), ((2, 1, 4, 2), (2, 2, 2, 1), (2, 3, 3, 1), (1, 4, 1, 1))
    ):
        x = torch.randn(rows, K, device="cuda").bfloat16()
        adapter, launch = build_adapter(K, slices, rank, rows), Launch(*shape, EACH)
        if not can_fuse(*adapter[:3], launch) or not _own_rows(launch, adapter) or launch.split_k > K // 64:
            continue  # it has another kernel
        poison(rows, sum(slices))
        out = w4a16_matmul(x, *tensors, None, adapter, launch)
        assert_adapted(out, x, x.double() @ dense.T, adapter, slices, own_parts(launch))
        for _ in range(5):
            assert torch.equal(out, w4a16_matmul(x, *tensors, None, adapter, launch))


def test_a_graph_computes_what_its_input_holds():
    K, slices = LINEARS[2]
    tensors, dense = build(K, slices)
    adapter = build_adapter(K, slices, 32, 40)
    x = torch.randn(40, K, device="cuda").bfloat16()
    launches = [Launch(2, 2, STREAM_K, 1), Launch(2, 1, 6, 2), Launch(2, 1, 6, 2, EACH)]
    for launch in launches:
        w4a16_matmul(x, *tensors, None, adapter, launch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
        out = [w4a16_matmul(x, *tensors, None, adapter, launch) for launch in launches]
    for _ in range(2):
        graph.replay()
        for each, launch in zip(out, launches, strict=True):
            assert_adapted(each, x, x.double() @ dense.T, adapter, slices, own_parts(launch))
    assert_flags_are_left_at_zero()
