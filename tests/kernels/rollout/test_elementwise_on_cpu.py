"""Norm and activation on a CPU: the bits of transformers' layers, and what compilers are told of their shapes."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from verl_qerl.kernels.rollout import elementwise
from verl_qerl.kernels.rollout.elementwise import (
    MAX_COLUMNS,
    add_rms_norm,
    can_normalize,
    can_silu,
    rms_norm,
    silu_mul,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def norm_of(K: int, dtype: torch.dtype) -> Qwen2RMSNorm:
    norm = Qwen2RMSNorm(K, eps=1e-5)
    norm.weight.data = (1 + 0.1 * torch.randn(K)).to(dtype)
    return norm


@torch.no_grad()
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96), (1, 3584)], ids=str)
def test_a_norm_is_that_of_transformers(shape):
    norm = norm_of(shape[-1], torch.bfloat16)
    x = (3 * torch.randn(shape)).bfloat16()
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
    # Rounded before the product: with one rounding a part of them differs.
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert not torch.equal((x.float() * scale * norm.weight.float()).bfloat16(), norm(x))


@torch.no_grad()
def test_a_float32_weight_counts_in_full():
    x = torch.randn(4, 64).bfloat16()
    weight = 1 + 2**-12 * torch.rand(64)
    expected = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_sum_is_rounded_for_the_residual_alone(dtype):
    x, residual = (torch.randn(5, 256).bfloat16() for _ in range(2))
    weight = norm_of(256, dtype).weight
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    whole = x.double() + residual.double()
    normalized = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = normalized.to(dtype).double() * weight.double()
    assert torch.equal(y, expected.bfloat16())
    assert not torch.equal(y, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96)], ids=str)
def test_the_activation_is_that_of_transformers(shape):
    gate, up = (torch.randn(shape).bfloat16() for _ in range(2))
    assert torch.equal(silu_mul(torch.cat((gate, up), -1)), torch.nn.functional.silu(gate) * up)


def test_what_the_kernels_take():
    weight = torch.ones(MAX_COLUMNS)
    assert can_normalize(weight)
    assert can_normalize(weight.bfloat16())
    assert not can_normalize(weight.half())
    assert not can_normalize(weight[:60])
    assert not can_normalize(torch.ones(MAX_COLUMNS + 8))
    x = torch.zeros(2, 48, dtype=torch.bfloat16)
    assert can_silu(x)
    assert not can_silu(x.half())
    assert not can_silu(x[:, :40])


@pytest.mark.parametrize("K", [8, 1536, 2048, 3584, 5120, 8192, 12288, MAX_COLUMNS])
def test_a_block_takes_a_row(K):
    threads, chunks = elementwise._block(K)
    assert threads % 32 == 0
    assert threads <= 512
    assert chunks <= 4
    assert threads * chunks * 8 >= K > (threads - 32) * chunks * 8
    assert f"#define THREADS {threads}\n" in elementwise.source(threads, chunks, wide=False)


@pytest.fixture
def launched(monkeypatch):
    """What kernels were launched with: grid, threads, arguments."""
    calls = []
    for name in ("_norm_kernel", "_silu_kernel"):
        monkeypatch.setattr(elementwise, name, lambda *how: lambda *given: calls.append((how, *given)))
    return calls


def test_a_launch_covers_every_row(launched):
    x, residual = (torch.zeros(2, 3, 4, 264, dtype=torch.bfloat16)[:, 1] for _ in range(2))
    weight = torch.ones(264)
    elementwise._launch_norm(x, residual, weight, 1e-5)
    elementwise._launch_norm(x, None, weight.bfloat16(), 1e-5)
    for (how, grid, threads, args), (wide, adds) in zip(launched, ((True, 1), (False, 0)), strict=True):
        assert (how, grid, threads) == ((64, 1, wide, False), 8, 64)
        assert all(one.is_contiguous() and one.shape == (2, 4, 264) for one in (*args[:2], *args[3:5]))
        assert args[5:7] == [264, adds]
        assert args[7].value == pytest.approx(1e-5)


# More ids than tokens, as a buffer has them.
IDS = torch.tensor([2, 0, 1, 2, 3, 3, 0, 0], dtype=torch.int32)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(5, 64), (3, 2, 32), (1, 3584), (0, 64)], ids=str)
def test_each_token_has_a_weight_of_its_own(shape):
    table = 1 + 0.1 * torch.randn(4, shape[-1])
    x, residual = ((3 * torch.randn(shape)).bfloat16() for _ in range(2))
    alone = rms_norm(x, table, 1e-5, IDS)
    y, total = add_rms_norm(x, residual, table, 1e-5, IDS)
    assert alone.shape == y.shape == total.shape == shape
    for token in range(shape[0]):
        weight = table[IDS[token]]
        assert torch.equal(alone[token], rms_norm(x[token], weight, 1e-5))
        expected = add_rms_norm(x[token], residual[token], weight, 1e-5)
        assert torch.equal(y[token], expected[0])
        assert torch.equal(total[token], expected[1])


def test_a_launch_with_a_weight_for_each_token(launched, monkeypatch):
    monkeypatch.setattr(elementwise, "_has_kernel", lambda *_: True)
    x, table = torch.zeros(4, 3, 264, dtype=torch.bfloat16), torch.ones(4, 264)
    rms_norm(x, table, 1e-5, IDS)
    add_rms_norm(x[:, 0], x[:, 1], table, 1e-5, IDS)
    for (how, grid, _, args), (rows, adds) in zip(launched, ((12, 0), (4, 1)), strict=True):
        assert (how, grid) == ((64, 1, True, True), rows)
        assert args[2] is table
        assert args[6] == adds
        assert args[8] is IDS
        assert args[9] == rows // 4
    with pytest.raises(ValueError, match="9 tokens have 8 row ids"):
        rms_norm(torch.zeros(9, 264, dtype=torch.bfloat16), table, 1e-5, IDS)


def test_a_launch_covers_every_activation(launched):
    y = elementwise._launch_silu(torch.zeros(5, 2 * 1000, dtype=torch.bfloat16))
    ((_, grid, threads, args),) = launched
    assert y.shape == (5, 1000)
    assert args[2:] == [125, 625]
    assert (grid - 1) * threads < 625 <= grid * threads


def test_compilers_see_one_operator_each():
    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def layer(x, residual, weight):
        y, total = add_rms_norm(rms_norm(x, weight, 1e-5), residual, weight, 1e-5)
        return silu_mul(y), total

    weight = torch.rand(64)
    for rows in (2, 3):
        x, residual = (torch.randn(rows, 64).bfloat16() for _ in range(2))
        y, total = add_rms_norm(rms_norm(x, weight, 1e-5), residual, weight, 1e-5)
        found = layer(x, residual, weight)
        assert torch.equal(found[0], silu_mul(y))
        assert torch.equal(found[1], total)
    torch.library.opcheck(add_rms_norm, (x, residual, weight, 1e-5))
    torch.library.opcheck(rms_norm, (x[:, ::2], weight[:32], 1e-5), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(silu_mul, (x,))
    table = torch.rand(4, 64)
    torch.library.opcheck(rms_norm, (x, table, 1e-5, IDS))
    torch.library.opcheck(add_rms_norm, (x, residual, table, 1e-5, IDS))
