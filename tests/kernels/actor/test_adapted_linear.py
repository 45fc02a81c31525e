"""Adapted linears on a GPU."""

import pytest
import torch
from qerl_testing import load_beside

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

small = load_beside(__file__, "small_adapter")


@pytest.mark.parametrize("bias", [None, 40.0])
def test_nothing_of_a_small_adapter_is_lost(bias):
    assert small.share_that_arrives("cuda", bias) == pytest.approx(1, abs=0.1)
