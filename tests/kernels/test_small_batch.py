"""The kernel for a few rows on a GPU, against float64 and the separate low-rank product."""

import functools

import pytest
import torch

from verl_qerl.kernels.lora import lora_expand, lora_shrink, member_of_tile
from verl_qerl.kernels.small_batch import LAUNCHES, Adapter, small_batch_matmul
from verl_qerl.kernels.tiled import tile
from verl_qerl.nvfp4 import reference
from verl_qerl.nvfp4.format import PackedWeight
from verl_qerl.testing import random_packed_weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ACTIVE = torch.tensor([False])
ROWS = [1, 2, 8, 9, 16]
# (K, columns of the members): a K below, at and above what the warps of a cluster take at once; linears of a 7B.
LINEARS = [(16, (64,)), (144, (128, 64)), (3584, (3584, 512, 512)), (18944, (3584,)), (3584, (18944, 18944))]


@functools.cache
def build(K: int, slices: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    weight = random_packed_weight(sum(slices), K, device="cuda")
    words, scale = tile(weight)
    return (words, scale.view(torch.uint8), weight.global_decode_scale.reshape(1)), reference.dequantize(
        weight
    ).double()


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Rounded once to bf16; float32 sums of K products are off by less than what is added here."""
    return bool(((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all())


@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_is_the_product_rounded_once(rows, linear):
    tensors, dense = build(*linear)
    x = torch.randn(rows, linear[0], device="cuda").bfloat16()
    bias = torch.randn(dense.shape[0], device="cuda").bfloat16()
    torch.full((rows, dense.shape[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = small_batch_matmul(x, *tensors, bias)
    assert close(out, x.double() @ dense.T + bias.double())
    assert torch.equal(out, small_batch_matmul(x, *tensors, bias))
    assert close(small_batch_matmul(x, *tensors), x.double() @ dense.T)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_launch_gives_the_product(launch):
    tensors, dense = build(3584, (3584, 512, 512))
    x = torch.randn(5, 3584, device="cuda").bfloat16()
    assert close(small_batch_matmul(x, *tensors, launch=launch), x.double() @ dense.T)


def test_every_code_and_every_normal_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    scale = torch.arange(128, dtype=torch.uint8).clamp(8, 126)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    weight = PackedWeight(codes, scale, torch.tensor(2.0**-12)).to("cuda")
    words, tiled_scale = tile(weight)
    x = torch.eye(512, device="cuda").bfloat16()
    columns = [
        small_batch_matmul(
            part.contiguous(), words, tiled_scale.view(torch.uint8), weight.global_decode_scale.reshape(1)
        )
        for part in x.split(16)
    ]
    assert torch.equal(torch.cat(columns).T, reference.dequantize(weight))


@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("linear", LINEARS[1:], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 13])
def test_the_adapter_in_the_epilogue_is_the_separate_product(rows, linear, rank):
    K, slices = linear
    tensors, dense = build(K, slices)
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(rows, K, device="cuda", generator=generator).bfloat16()
    a = (torch.randn(len(slices) * rank, K, device="cuda", generator=generator) * K**-0.5).bfloat16()
    b = torch.randn(sum(slices), rank, device="cuda", generator=generator).bfloat16()
    members = member_of_tile(slices, "cuda")
    slots = torch.zeros(rows + 2, dtype=torch.int64, device="cuda")
    slots[1::2] = -1
    partial = lora_shrink(x, a, ACTIVE)
    out = small_batch_matmul(x, *tensors, None, Adapter(partial, b, members, slots))
    zero = torch.zeros(rows, sum(slices), dtype=torch.bfloat16, device="cuda")
    low = lora_expand(zero.float(), partial, b, members, slots, ACTIVE, None, K)
    assert close(out, x.double() @ dense.T + low.double())
    assert (low != 0).any() == (slots[:rows] >= 0).any()
