"""The linears of all experts at the sizes of Qwen3-30B-A3B, on a GPU."""

import pytest
import torch
from qerl_testing import assert_close

from verl_qerl.formats import reference
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4
from verl_qerl.kernels.actor.linear import experts_linear

pytestmark = pytest.mark.gpu

E = 128
STACKS = {"gate_up": (1536, 2048, 2), "down": (2048, 768, 1)}  # N, K, weights an expert


def decoder(codes, scale, decode):
    rows = codes.flatten(0, 1), scale.flatten(0, 1), decode
    return lambda dtype: dequantize_nvfp4(*rows, dtype).view(*codes.shape[:2], -1)


def stack(N: int, K: int, parts: int):
    """Random codes and scales on the GPU; every weight has a global scale of its own."""
    generator = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 256, (E, N, K // 2), generator=generator, device="cuda", dtype=torch.uint8)
    scale = torch.randint(8, 127, (E, N, K // 16), generator=generator, device="cuda", dtype=torch.uint8)
    powers = torch.randint(-20, -12, (E * parts,), generator=generator, device="cuda")
    return codes, scale, torch.exp2(powers.float())


@pytest.mark.parametrize("sizes", STACKS.values(), ids=STACKS.keys())
def test_each_weight_is_decoded_with_its_global_scale(sizes):
    N, K, parts = sizes
    codes, scale, decode = stack(*sizes)
    dense = decoder(codes, scale, decode)(torch.bfloat16).view(E * parts, -1, K)
    rows = N // parts
    for g in (0, 1, E * parts // 2, E * parts - 1):
        of_g = slice(g * rows, (g + 1) * rows)
        bits = codes.flatten(0, 1)[of_g].cpu(), scale.flatten(0, 1)[of_g].cpu().view(torch.float8_e4m3fn)
        assert torch.equal(dense[g].cpu(), reference.dequantize(nvfp4_weight(*bits, decode[g].cpu())))


@pytest.mark.parametrize("sizes", STACKS.values(), ids=STACKS.keys())
def test_forward_and_backward_are_the_products_of_each_expert(sizes):
    N, K, _ = sizes
    decode = decoder(*stack(*sizes))
    generator = torch.Generator("cuda").manual_seed(1)
    counts = torch.randint(0, 129, (E,), generator=generator, device="cuda")
    counts[[0, 77]] = 0  # experts that no token chose
    ends = counts.cumsum(0).int()
    S = int(ends[-1])
    x = torch.randn(S, K, generator=generator, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(S, N, generator=generator, device="cuda").bfloat16()
    y = experts_linear(x, ends, decode)
    y.backward(grad)
    dense = decode(torch.bfloat16)
    for e in (1, 2, 64, 127):
        of_e = slice(int(ends[e - 1]), int(ends[e]))
        # bf16 of a sum in float32: half a unit of the last place, rms 1.7e-3.
        assert_close(y[of_e].detach(), x[of_e].detach().float() @ dense[e].float().T, 2.5e-3)
        assert_close(x.grad[of_e], grad[of_e].float() @ dense[e].float(), 2.5e-3)
