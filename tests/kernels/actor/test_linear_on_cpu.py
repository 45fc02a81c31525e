import pytest
import torch
import torch.nn.functional as F
from qerl_testing import assert_close, random_packed_weight

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.reference import dequantize
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4
from verl_qerl.kernels.actor.linear import frozen_linear

# One rounding of the result is at most half a step of each element. Products are summed in float32.
HALF_STEP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-21}
SHAPES = [(1, 16), (33, 48), (128, 176)]


def tensors(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.codes, weight.block_scale.view(torch.uint8), weight.global_decode_scale


def nvfp4_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, last: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return frozen_linear(x, lambda dtype: dequantize_nvfp4(codes, scale, last, dtype), bias)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


each_dtype = pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@each_dtype
@each_shape
def test_forward_is_the_dense_product(shape, dtype):
    N, K = shape
    weight, x, bias = random_packed_weight(N, K), normal(2, 5, K, dtype=dtype), normal(N, dtype=dtype, seed=1)
    y = nvfp4_linear(x, *tensors(weight), bias)
    assert y.dtype == dtype
    assert torch.equal(y, F.linear(x, dequantize(weight, dtype), bias))
    assert_close(y, F.linear(x.double(), dequantize(weight, torch.float64), bias.double()), HALF_STEP[dtype])


@each_dtype
@each_shape
def test_grad_x_is_the_dense_product(shape, dtype):
    N, K = shape
    weight, x, grad_y = random_packed_weight(N, K), normal(2, 5, K, dtype=dtype), normal(2, 5, N, dtype=dtype, seed=1)
    x.requires_grad_()
    nvfp4_linear(x, *tensors(weight)).backward(grad_y)
    assert x.grad.dtype == dtype
    assert_close(x.grad, grad_y.double() @ dequantize(weight, torch.float64), HALF_STEP[dtype])


def test_backward_is_the_derivative_of_forward():
    weight = random_packed_weight(5, 32)
    x = normal(3, 32).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: nvfp4_linear(x, *tensors(weight), normal(5).double()), (x,))


def test_neither_the_dense_weight_nor_the_packed_one_is_saved():
    """The packed one stays where it is; verl's activation offload would move what is saved to the host and back."""
    weight, saved = random_packed_weight(128, 256), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = normal(7, 256, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nvfp4_linear(x, *tensors(weight)).sum().backward()
    assert not saved


def test_an_input_without_gradient_needs_no_backward():
    assert not nvfp4_linear(normal(2, 16), *tensors(random_packed_weight(8, 16))).requires_grad


def test_under_gradient_checkpointing():
    weight, decoded = random_packed_weight(16, 32), []
    decode = lambda dtype: decoded.append(dtype) or dequantize(weight, dtype)  # noqa: E731
    grads = []
    for checkpointed in (False, True):
        x = normal(4, 32).requires_grad_()
        call = lambda x: frozen_linear(torch.sin(x), decode).square()  # noqa: E731
        y = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    # Forward and backward decode once each; a checkpoint runs forward once more.
    assert len(decoded) == 2 + 3
