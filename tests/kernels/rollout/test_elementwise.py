"""Norm and activation on a GPU, against float32 and against what the operators do on a CPU."""

import pytest
import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout import elementwise
from verl_qerl.kernels.rollout.elementwise import (
    MAX_COLUMNS,
    add_rms_norm,
    rms_norm,
    silu_mul,
)

pytestmark = pytest.mark.gpu
poison = load_beside(__file__, "unwritten").poison

ROWS = [1, 7, 32, 128, 300, 4096]
SIZES = [8, 264, 1536, 3584, 5120, 8192, MAX_COLUMNS]


def normalized(total: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(product, how far a result may be from it): its own rounding, and that of the normalized row at its neighbour."""
    total = total.double()
    row = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    product = row.to(weight.dtype).double() * weight.double()
    steps = 2**-8 if weight.dtype == torch.float32 else 2**-8 + 2**-7
    return product, (steps + 1e-5) * product.abs() + 1e-30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_norm(rows, K, dtype):
    generator = torch.Generator("cuda").manual_seed(rows * K)
    x, residual = (5 * torch.randn(rows, K, device="cuda", generator=generator).bfloat16() for _ in range(2))
    weight = (1 + 0.1 * torch.randn(K, device="cuda", generator=generator)).to(dtype)
    poison(rows, K)
    alone = rms_norm(x, weight, 1e-6)
    poison(2, rows, K)
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    for found, of in ((alone, x.float()), (y, x.float() + residual.float())):
        expected, slack = normalized(of, weight)
        assert ((found.double() - expected).abs() <= slack).all()
        # A neighbour where float32 sums differ, else the same bits.
        assert (found == expected.bfloat16()).float().mean() > 0.99
    assert torch.equal(rms_norm(x.view(rows, 1, K), weight, 1e-6).view(rows, K), alone)
    assert torch.equal(alone, rms_norm(x, weight, 1e-6))


def with_rows(rows: int, K: int):
    generator = torch.Generator("cuda").manual_seed(rows * K)
    x, residual = (5 * torch.randn(rows, K, device="cuda", generator=generator).bfloat16() for _ in range(2))
    table = 1 + 0.1 * torch.randn(33, K, device="cuda", generator=generator)
    ids = torch.randint(0, 33, (rows + 5,), device="cuda", generator=generator, dtype=torch.int32)
    return x, residual, table, ids


@pytest.mark.hopper
@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_each_token_has_a_weight_of_its_own(rows, K):
    x, residual, table, ids = with_rows(rows, K)
    poison(rows, K)
    alone = rms_norm(x, table, 1e-6, ids)
    poison(2, rows, K)
    y, total = add_rms_norm(x, residual, table, 1e-6, ids)
    assert torch.equal(total, x + residual)
    weight = table[ids[:rows].long()]
    for found, of in ((alone, x.float()), (y, x.float() + residual.float())):
        expected, slack = normalized(of, weight)
        assert ((found.double() - expected).abs() <= slack).all()
        assert (found == expected.bfloat16()).float().mean() > 0.99
    # The bits of the norm with one weight.
    same = torch.full_like(ids, 7)
    assert torch.equal(rms_norm(x, table, 1e-6, same), rms_norm(x, table[7].contiguous(), 1e-6))
    pairs = (add_rms_norm(x, residual, table, 1e-6, same), add_rms_norm(x, residual, table[7].contiguous(), 1e-6))
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


@pytest.mark.hopper
def test_heads_of_a_token_have_its_weight():
    x, _, table, ids = with_rows(12, 128)
    of_heads = rms_norm(x.view(4, 3, 128), table, 1e-6, ids)
    assert torch.equal(of_heads.view(12, 128), rms_norm(x, table, 1e-6, ids[:4].repeat_interleave(3)))


@pytest.mark.hopper
def test_a_graph_takes_the_ids_of_its_run():
    x, residual, table, ids = with_rows(40, 3584)
    elementwise.prepare_rows([3584], x.device)
    first = rms_norm(x, table, 1e-6, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):  # started early one after the other
            y, total = add_rms_norm(x, residual, table, 1e-6, ids)
            last = rms_norm(total, table, 1e-6, ids)
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        ids.copy_(torch.randint(0, 33, ids.shape, device="cuda", generator=generator))
        table.normal_(generator=generator)
        graph.replay()
        expected, its_total = add_rms_norm(x, residual, table, 1e-6, ids)
        assert torch.equal(y, expected)
        assert torch.equal(last, rms_norm(its_total, table, 1e-6, ids))
    assert not torch.equal(first, rms_norm(x, table, 1e-6, ids))


def test_other_dtypes_and_gpus_have_it_in_torch(monkeypatch):
    x, residual, table, ids = with_rows(12, 256)
    found = add_rms_norm(x.half(), residual.half(), table, 1e-6, ids)
    assert found[0].dtype == torch.float16
    expected, _ = normalized(x.float() + residual.float(), table[ids[:12].long()])
    assert torch.allclose(found[0].double(), expected, rtol=2**-9)
    monkeypatch.setattr(elementwise, "_has_kernel", lambda *_: False)
    in_torch = add_rms_norm(x, residual, table, 1e-6, ids)
    assert torch.allclose(in_torch[0].double(), expected, rtol=2**-7)
    assert torch.equal(in_torch[1], x + residual)


def test_rows_need_not_be_contiguous():
    x = torch.randn(5, 3, 512, device="cuda").bfloat16()[:, 1]
    weight = torch.rand(512, device="cuda")
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))
    y, total = add_rms_norm(x, x, weight, 1e-6)
    assert torch.equal(total, x + x)
    assert torch.equal(y, add_rms_norm(x.contiguous(), x.contiguous(), weight, 1e-6)[0])
    assert torch.equal(silu_mul(x), silu_mul(x.contiguous()))


@pytest.mark.parametrize("I", [8, 1000, 8960, 18944])
@pytest.mark.parametrize("rows", ROWS)
def test_the_activation(rows, I):  # noqa: E741
    x = 4 * torch.randn(rows, 2 * I, device="cuda").bfloat16()
    poison(rows, I)
    found = silu_mul(x)
    gate, up = x.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up  # the same two roundings
    assert ((found - expected).abs().double() <= 2**-6 * expected.abs().double() + 1e-30).all()
    assert (found == expected).float().mean() > 0.99


def test_the_activation_far_from_zero():
    gate = torch.tensor([-300, -100, -88, -20, 0, 20, 88, 300], device="cuda").bfloat16()
    found = silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    assert torch.allclose(found.float(), torch.nn.functional.silu(gate.float()), rtol=2**-7, atol=1e-30)
