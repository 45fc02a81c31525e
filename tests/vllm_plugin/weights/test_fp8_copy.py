"""vLLM's FP8 product of a copy in E4M3, on a GPU, against float64."""

import pytest
import torch

from verl_qerl.formats import reference
from verl_qerl.testing import random_packed_weight

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (1088, 896)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_rounded_operands(shape):
    from verl_qerl.kernels.rollout.repacking import repack
    from verl_qerl.vllm_plugin.weights.fp8_copy import make_copy, multiply_fp8

    N, K = shape
    weight = random_packed_weight(N, K, device="cuda")
    exact = reference.dequantize(weight, torch.float32).double()
    copy = make_copy(*repack(weight))
    codes, scales = copy
    copied = codes.double() * scales.double()
    assert float((copied - exact).norm() / exact.norm()) < 0.03
    bias = torch.randn(N, device="cuda").bfloat16() * float(exact.std()) * K**0.5
    for rows in (64, 65, 128, 256, 512):
        x = torch.randn(rows, K, device="cuda").bfloat16()
        x[1] *= 100  # each token has a scale of its own
        a = (x.double().abs().amax(1, keepdim=True) / 448).float()
        rounded = (x.float() / a).to(torch.float8_e4m3fn).double() * a.double()
        y = multiply_fp8(x, copy, None)
        assert (y.shape, y.dtype) == ((rows, N), torch.bfloat16)
        errors = {}
        for name, wanted in (("same operands", rounded @ copied.T), ("packed weight", x.double() @ exact.T)):
            each = (y.double() - wanted).norm(dim=1) / wanted.norm(dim=1)  # of a token
            errors[name] = float(each.max())
        print(f"{N} x {K}, {rows} rows: {errors}")
        # bf16 rounds by 1.7e-3; tensor cores add FP8 products with less than float32's precision.
        assert errors["same operands"] < 0.01
        assert 0.01 < errors["packed weight"] < 0.05
        with_bias = multiply_fp8(x, copy, bias).double()
        assert float((with_bias - y.double() - bias.double()).norm() / with_bias.norm()) < 0.01
