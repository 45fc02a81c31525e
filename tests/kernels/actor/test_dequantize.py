"""The Triton kernel on a GPU against the reference on the CPU."""

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.formats import PackedWeight, reference
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4, dequantize_siblings

pytestmark = pytest.mark.gpu

SMALL = [(1, 16), (1, 1024), (3, 48), (5, 1040), (7, 16), (9, 3072), (2, 4112)]
LARGE = [(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944), (18945, 3600)]  # the linears of a 7B, one made odd
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return dequantize_nvfp4(weight.codes, weight.block_scale.view(torch.uint8), weight.global_decode_scale, dtype)


def with_global(weight: PackedWeight, value: float) -> PackedWeight:
    return nvfp4_weight(weight.codes, weight.block_scale, torch.tensor(value))


def check(weight: PackedWeight, dtype: torch.dtype) -> None:
    """Decode on the GPU into memory that holds NaN, and compare bits."""
    on_gpu, weight = weight.to("cuda"), weight.to("cpu")
    # The allocator gives the freed block to the next tensor of this size.
    torch.full(weight.shape, float("nan"), dtype=dtype, device="cuda")
    out = dequantize(on_gpu, dtype).cpu()
    expected = reference.dequantize(weight, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_shapes(shape, dtype):
    check(random_packed_weight(*shape), dtype)


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_shapes_of_a_7b(shape):
    check(random_packed_weight(*shape, device="cuda"), torch.bfloat16)


def test_more_elements_than_an_int32_counts():
    rows = random_packed_weight(8, 16384)
    codes, scale = rows.codes.cuda().repeat(16385, 1), rows.block_scale.view(torch.uint8).cuda().repeat(16385, 1)
    weight = nvfp4_weight(codes, scale.view(torch.float8_e4m3fn), rows.global_decode_scale.cuda())
    assert weight.shape[0] * weight.shape[1] > 2**31
    assert torch.equal(dequantize(weight)[-8:].cpu(), reference.dequantize(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte(every_byte, dtype):
    check(every_byte, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0123, 1 / 3, 2.0**-130], ids=str)
def test_any_global_scale_is_rounded_once(every_byte, value, dtype):
    check(with_global(every_byte, value), dtype)
    check(with_global(random_packed_weight(5, 1040), value), dtype)


def test_column_major_tensors():
    weight = random_packed_weight(6, 64)
    scale = weight.block_scale.view(torch.uint8).cuda().T.contiguous().T.view(torch.float8_e4m3fn)
    moved = nvfp4_weight(weight.codes.cuda().T.contiguous().T, scale, weight.global_decode_scale.cuda())
    assert torch.equal(dequantize(moved).cpu(), reference.dequantize(weight))


def test_tensors_that_start_at_an_odd_byte():
    weight = random_packed_weight(3, 48)
    codes, scale = weight.codes.flatten().cuda(), weight.block_scale.view(torch.uint8).flatten().cuda()
    pad = torch.zeros(1, dtype=torch.uint8, device="cuda")
    moved = nvfp4_weight(
        torch.cat((pad, codes))[1:].view(3, 24),
        torch.cat((pad, scale))[1:].view(3, 3).view(torch.float8_e4m3fn),
        weight.global_decode_scale.cuda(),
    )
    assert torch.equal(dequantize(moved).cpu(), reference.dequantize(weight))


def test_under_torch_compile():
    weight = random_packed_weight(64, 96).to("cuda")
    assert torch.equal(torch.compile(dequantize, fullgraph=True)(weight), dequantize(weight))


def parts(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.codes, weight.block_scale.view(torch.uint8), weight.global_decode_scale


# Members of 7B, and rows that no program has whole; the first weight alone, then with others of its K.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "K"), [((3584, 512, 512), 3584), ((18944, 18944), 3584), ((5, 9, 1), 1040)], ids=str)
def test_siblings_are_decoded_in_one_launch(rows, K, dtype):
    weights = [with_global(random_packed_weight(N, K, seed=N + i), 2.0**-i) for i, N in enumerate(rows)]
    on_gpu = [parts(weight.to("cuda")) for weight in weights]
    for count in (*range(1, len(rows) + 1), len(rows)):  # the last one launches what was compiled
        torch.full((sum(rows[:count]), K), float("nan"), dtype=dtype, device="cuda")
        found = dequantize_siblings(on_gpu[:count], dtype)
        for out, weight in zip(found, weights, strict=False):
            assert torch.equal(out.cpu(), reference.dequantize(weight, dtype))
