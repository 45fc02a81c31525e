"""X A^T on a GPU, against float64."""

import pytest
import torch

from verl_qerl.kernels.rollout.low_rank import low_rank

pytestmark = pytest.mark.gpu


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
