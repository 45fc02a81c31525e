"""What NVFP4 alone has; what all formats have in common: test_packed_linear_on_cpu.py."""

import pytest
import torch
import torch.nn as nn
from qerl_testing import random_packed_weight

from verl_qerl.modules.format_linear import NVFP4Linear


@pytest.fixture
def packed():
    linear = NVFP4Linear.from_linear(nn.Linear(48, 24, dtype=torch.bfloat16))
    linear.fill(random_packed_weight(24, 48))
    return linear


def test_the_global_scale_is_held_as_bytes_of_a_vector(packed):
    assert packed.weight_decode_scale.shape == (4,)
    assert packed.packed().global_decode_scale.shape == ()


def test_holds_nine_bytes_for_sixteen_weights_and_no_more(packed):
    assert sum(buffer.nbytes for buffer in packed.buffers()) == 48 * 24 * 9 // 16 + 4


def test_under_torch_compile(packed):
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), packed(x))
