"""X A^T on a GPU, against float64."""

import pytest
import torch

from verl_qerl.kernels.rollout.low_rank import low_rank, quantize_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("K", "columns"), [(64, 8), (3584, 96), (18944, 32), (5120, 384)], ids=str)
@pytest.mark.parametrize("rows", [1, 65, 128, 200, 1000])
def test_is_the_product_rounded_once(rows, K, columns):
    x = torch.randn(rows, K, device="cuda").bfloat16()
    a = (torch.randn(columns, K, device="cuda") * K**-0.5).bfloat16()
    slots = torch.zeros(rows + 2, dtype=torch.int64, device="cuda")
    slots[1::3] = -1
    scale = torch.full((1,), 2.0**-11, device="cuda")  # times 256: an eighth
    torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda")  # whose memory the result gets
    low = low_rank(x, a, slots, scale)
    expected = x.double() @ a.double().T * (slots[:rows, None] >= 0)
    error = (low.double() / 8 - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()
    assert not low[1::3].any()
    assert low[0].any()
    for _ in range(5):
        assert torch.equal(low, low_rank(x, a, slots, scale))


@pytest.mark.parametrize(("K", "columns"), [(64, 0), (3584, 96), (18944, 32)], ids=str)
@pytest.mark.parametrize("rows", [1, 65, 256, 1000])
def test_rows_in_e4m3_are_those_of_torch(rows, K, columns):
    x = torch.randn(rows, K, device="cuda").bfloat16() * torch.logspace(-6, 3, rows, device="cuda")[:, None].bfloat16()
    x[-1] = 0
    a = (torch.randn(columns, K, device="cuda") * K**-0.5).bfloat16() if columns else None
    slots = torch.arange(rows, device="cuda") % 3 - 1
    codes, scales, low = quantize_rows(x, a, slots if columns else None)
    of_rows = (x.float().abs().amax(1, keepdim=True) / torch.tensor(448.0, device="cuda")).clamp(min=1 / (512 * 448))
    assert torch.equal(scales, of_rows)
    assert torch.equal(codes.view(torch.uint8), (x.float() / of_rows).to(torch.float8_e4m3fn).view(torch.uint8))
    if a is not None:
        assert torch.equal(low, low_rank(x, a, slots, torch.full((1,), 2.0**-8, device="cuda")))
