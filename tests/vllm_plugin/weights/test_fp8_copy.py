"""The FP8 product by a copy in E4M3, with an adapter and without, on a GPU, against float64."""

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
        assert torch.equal(multiply_fp8(x, copy, None), y)


@pytest.mark.parametrize("rank", [8, 32, 128])
@pytest.mark.parametrize(
    ("members", "K"), [((3584, 512, 512), 3584), ((18944, 18944), 3584), ((64, 192), 896)], ids=str
)
def test_every_launch_adds_the_adapter(members, K, rank):
    from verl_qerl.kernels.rollout import fp8_matmul
    from verl_qerl.kernels.rollout.lora import member_of_tile
    from verl_qerl.kernels.rollout.repacking import repack
    from verl_qerl.kernels.rollout.w4a16_matmul import Adapter
    from verl_qerl.vllm_plugin.weights.fp8_copy import make_copy, multiply_fp8

    N = sum(members)
    copy = make_copy(*repack(random_packed_weight(N, K, device="cuda")))
    a, b = torch.randn(len(members) * rank, K).bfloat16().cuda() * K**-0.5, torch.randn(N, rank).bfloat16().cuda()
    bias = torch.randn(N, device="cuda").bfloat16()
    for rows in (64, 200, 300):
        x = torch.randn(rows, K, device="cuda").bfloat16()
        slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
        slots[::3] = -1
        adapter = Adapter(a, b, member_of_tile(members, "cuda"), slots)
        y = multiply_fp8(x, copy, None).double()
        low = (x.double() @ a.double().T).bfloat16().double() * (slots >= 0)[:, None]
        parts = zip(low.split(rank, 1), b.double().split(members), strict=True)
        expected = y + torch.cat([part @ of.T for part, of in parts], 1) + bias.double()
        found = multiply_fp8(x, copy, bias, adapter).double()
        assert float((found - expected).norm() / expected.norm()) < 4e-3
        # Every launch, with a product that is exact: ones.
        ones = torch.ones(rows, K, device="cuda").to(torch.float8_e4m3fn), torch.ones(rows, 1, device="cuda")
        ones_of_weight = torch.ones(N, K, device="cuda").to(torch.float8_e4m3fn), torch.ones(N, 1, device="cuda")
        given = fp8_matmul.Low(low.bfloat16(), b, adapter.members)
        parts = zip(low.split(rank, 1), b.double().split(members), strict=True)
        expected = K + torch.cat([part @ of.T for part, of in parts], 1)
        for launch in fp8_matmul.candidates(rows):
            found = fp8_matmul.fp8_matmul(*ones, *ones_of_weight, None, given, launch).double()
            assert float(((found - expected) / expected).abs().max()) < 2**-7, launch
