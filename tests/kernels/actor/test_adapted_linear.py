"""Adapted linears on a GPU."""

import pytest
import torch
from small_adapter import draw, share_that_arrives

from verl_qerl.kernels.actor.adapted_linear import FrozenWeights, adapted_linears

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("bias", [None, 4.0])
@pytest.mark.parametrize(("N", "K"), [(1536, 1536), (256, 1536), (1536, 8960)])
@pytest.mark.parametrize("rows", [64, 1024, 8192])
def test_nothing_of_a_small_adapter_is_lost(rows, N, K, bias):
    x, W, A = draw(rows, N, K, 8, "cuda")
    weights = FrozenWeights(lambda _: [W], lambda _: [W])
    biases = [None if bias is None else torch.full((N,), bias, dtype=x.dtype, device="cuda")]
    share = share_that_arrives(lambda B: adapted_linears(x, weights, [A], [B], [1.0], biases)[0], x, A, N)
    assert share == pytest.approx(1, abs=0.1)
