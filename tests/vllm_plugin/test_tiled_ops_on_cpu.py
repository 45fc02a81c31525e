"""The operators' references, which a machine without a GPU runs."""

import pytest
import torch

pytest.importorskip("vllm")
from verl_qerl.kernels.lora import lora_expand, lora_shrink, member_of_tile
from verl_qerl.kernels.tiled import tile
from verl_qerl.nvfp4 import reference
from verl_qerl.testing import random_packed_weight
from verl_qerl.vllm_plugin.tiled_ops import linear_tiled, lora_linear_tiled

ACTIVE, NONE = torch.tensor([False]), torch.tensor([True])


@pytest.fixture
def given():
    """(x, tensors of the weight, dense weight, bias, adapter)"""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight = random_packed_weight(128, 64)
    words, scale = tile(weight)
    tensors = (words, scale.view(torch.uint8), weight.global_decode_scale.reshape(1))
    adapter = (random(32, 64), random(128, 16), member_of_tile((64, 64), "cpu"), torch.tensor([0, 0, -1, 0, 0, 0]))
    return random(5, 64), tensors, reference.dequantize(weight, torch.bfloat16), random(128), adapter


def test_multiplies_by_the_decoded_weight(given):
    x, tensors, dense, bias, _ = given
    expected = torch.nn.functional.linear(x, dense, bias)
    assert torch.equal(linear_tiled(x, *tensors, None, bias, "128x64"), expected)
    assert torch.equal(linear_tiled(x, *tensors, dense, bias, "128x64"), expected)


def test_adds_the_adapter_and_then_the_bias(given):
    x, tensors, dense, bias, (a, *rest) = given
    out = lora_linear_tiled(x, *tensors, None, bias, "128x64", a, *rest, ACTIVE)
    y = torch.nn.functional.linear(x, dense)
    assert torch.equal(out, lora_expand(y, lora_shrink(x, a, ACTIVE), *rest, ACTIVE, bias, 64))
    assert (out - linear_tiled(x, *tensors, None, bias, "128x64")).abs().max() > 1


def test_without_an_active_adapter_it_is_the_base(given):
    x, tensors, _, bias, (a, *rest) = given
    out = lora_linear_tiled(x, *tensors, None, bias, "128x64", a, *rest, NONE)
    torch.testing.assert_close(out, linear_tiled(x, *tensors, None, bias, "128x64"), rtol=1e-2, atol=1e-2)


def test_can_be_traced(given):
    x, tensors, dense, bias, (a, *rest) = given
    torch.library.opcheck(linear_tiled, (x, *tensors, dense, bias, "128x64"))
    torch.library.opcheck(lora_linear_tiled, (x, *tensors, None, None, "128x64", a, *rest, ACTIVE))
