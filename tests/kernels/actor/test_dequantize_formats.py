"""The Triton kernels on a GPU against the formats on the CPU."""

import pytest
import torch

from verl_qerl.formats import get_format
from verl_qerl.kernels.actor.dequantize_formats import dequantize_format

pytestmark = pytest.mark.gpu

SHAPES = [(1, 32), (3, 96), (5, 1056), (9, 3072), (3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp4"])
def test_the_kernel_gives_the_bits_of_the_format(name, shape, dtype):
    form = get_format(name)
    tensors = form.quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(0))).tensors
    on_gpu = [tensor.cuda() for tensor in tensors]
    # The allocator gives the freed block to the next tensor of this size.
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    out = dequantize_format(form, on_gpu, dtype).cpu()
    expected = form.dequantize(tensors, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())
