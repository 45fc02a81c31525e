"""The packed linear on a GPU: against float64 on the CPU, and what it holds between the passes."""

import pytest
import torch
from qerl_testing import assert_close, random_packed_weight

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.reference import dequantize
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4
from verl_qerl.kernels.actor.linear import frozen_linear

pytestmark = pytest.mark.gpu

# One rounding of the result, at most half a step of each element, and as much for cuBLAS's split sums.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(1, 16), (33, 48), (512, 3584), (18944, 3584), (3584, 18944)]  # ends with linears of a 7B


def tensors(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = weight.to("cuda")
    return weight.codes, weight.block_scale.view(torch.uint8), weight.global_decode_scale


def nvfp4_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, last: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return frozen_linear(x, lambda dtype: dequantize_nvfp4(codes, scale, last, dtype), bias)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_grad_x(shape, dtype):
    N, K = shape
    weight, x, grad_y = random_packed_weight(N, K), normal(17, K, dtype=dtype), normal(17, N, dtype=dtype, seed=1)
    x.requires_grad_()
    y = nvfp4_linear(x, *tensors(weight))
    y.backward(grad_y)
    dense = dequantize(weight, torch.float32).to("cuda").double()
    assert_close(y.detach(), x.detach().double() @ dense.T, TOLERANCE[dtype])
    assert_close(x.grad, grad_y.double() @ dense, TOLERANCE[dtype])


def test_no_dense_weight_outlives_a_pass():
    N, K = 18944, 3584
    packed, x = tensors(random_packed_weight(N, K)), normal(16, K).requires_grad_()
    nvfp4_linear(x, *packed).sum().backward()  # cuBLAS takes its workspace once
    before = torch.cuda.memory_allocated()
    y = nvfp4_linear(x, *packed)
    assert torch.cuda.memory_allocated() - before < 2 * y.numel() * y.element_size()
    y.sum().backward()
    del y
    assert torch.cuda.memory_allocated() == before
