"""Norm and activation with X A^T on a GPU: elementwise.cu's rows, and products against float64, also in a graph."""

import pytest
import torch

from verl_qerl.kernels.elementwise import add_rms_norm, silu_mul
from verl_qerl.kernels.elementwise_low import add_rms_norm_low, recall, silu_mul_low
from verl_qerl.kernels.tiled_matmul import tiled_matmul
from verl_qerl.testing import load_beside

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROWS = [1, 65, 128, 200, 256, 1000]
NORMS = [(64, 8), (896, 24), (3584, 96), (5120, 64), (6144, 384)]
INNER = [(64, 8), (4864, 16), (18944, 32), (27648, 32), (9472, 128)]


def inputs(rows, K, columns):
    generator = torch.Generator("cuda").manual_seed(rows * K)
    x, residual = (torch.randn(rows, K, device="cuda", generator=generator).bfloat16() for _ in range(2))
    a = (torch.randn(columns, K, device="cuda", generator=generator) * K**-0.5).bfloat16()
    slots = torch.zeros(rows + 2, dtype=torch.int64, device="cuda")
    slots[1::3] = -1
    return x, residual, a, (a, slots, torch.full((1,), 2.0**-11, device="cuda"))  # times 256: an eighth


def in_a_graph(run):
    """What `run` gives when it is captured and replayed twice."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for tensor in found:
        tensor.fill_(torch.nan)
    graph.replay()
    graph.replay()
    return found


def assert_low(low, y, a, slots):
    expected = y.double() @ a.double().T * (slots[: len(y), None] >= 0)
    assert ((low.double() / 8 - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()
    assert not low[1::3].any()
    assert low[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "columns"), NORMS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_the_norm(rows, K, columns, dtype):
    x, residual, a, of_linear = inputs(rows, K, columns)
    weight = torch.linspace(0.5, 1.5, K, device="cuda").to(dtype)

    def run():
        y, total = add_rms_norm_low(x, residual, weight, 1e-6, *of_linear)
        return y, total, recall(y, a)

    y, total, low = run()
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert (y == expected).float().mean() > 0.99  # float32 sums differ
    # A step of the normalized row, times a weight in bf16, can be two of the result.
    assert ((y.double() - expected.double()).abs() <= 2**-6 * expected.double().abs()).all()
    assert_low(low, y, a, of_linear[1])
    for again in (run(), in_a_graph(run)):
        assert all(torch.equal(*pair) for pair in zip((y, total, low), again, strict=True))


@pytest.mark.parametrize(("K", "columns"), INNER, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_the_activation(rows, K, columns):
    x, other, a, of_linear = inputs(rows, K, columns)
    pair = torch.cat((x, other), dim=1)

    def run():
        y = silu_mul_low(pair, *of_linear)
        return y, recall(y, a)

    y, low = run()
    assert torch.equal(y, silu_mul(pair))
    assert_low(low, y, a, of_linear[1])
    for again in (run(), in_a_graph(run)):
        assert all(torch.equal(*pair) for pair in zip((y, low), again, strict=True))


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 65, 128, 256])
@pytest.mark.parametrize(
    ("K", "slices"), [(3584, (3584, 512, 512)), (3584, (18944, 18944)), (5120, (5120, 1024, 1024))], ids=str
)
def test_the_linear_takes_it(rows, K, slices):
    of_matmul = load_beside(__file__, "test_tiled_matmul")
    tensors, dense = of_matmul.build(K, slices)
    its = of_matmul.build_adapter(K, slices, 32, rows)
    x, residual = (torch.randn(rows, K, device="cuda").bfloat16() for _ in range(2))

    def run():
        y, _ = add_rms_norm_low(x, residual, torch.ones(K, device="cuda"), 1e-6, its.a, its.slots, tensors[2])
        of_matmul.poison(rows, dense.shape[0])
        return y, tiled_matmul(y, *tensors, adapter=its)

    y, out = run()
    of_matmul.assert_adapted(out, y, y.double() @ dense.T, its, slices)
    for _ in range(3):
        assert torch.equal(out, run()[1])
