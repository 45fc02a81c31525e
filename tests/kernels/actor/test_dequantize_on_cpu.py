"""The Triton kernel in Triton's interpreter, in a process of its own: the variable that starts it acts on import."""

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.formats import PackedWeight, reference
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.actor import dequantize as kernel
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4, dequantize_siblings

# Below, at, just above and between multiples of what a program decodes, one row, one block, odd numbers.
SHAPES = [(1, 16), (1, 1024), (3, 48), (4, 1024), (5, 1040), (7, 16), (9, 3072), (64, 176), (3, 3584), (2, 4112)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def arguments(weight: PackedWeight, dtype: torch.dtype) -> tuple:
    return weight.codes, weight.block_scale.view(torch.uint8), weight.global_decode_scale, dtype


def with_global(weight: PackedWeight, value: float) -> PackedWeight:
    return nvfp4_weight(weight.codes, weight.block_scale, torch.tensor(value))


def strided(weight: PackedWeight) -> PackedWeight:
    """The same weight, its tensors column-major."""
    scale = weight.block_scale.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn)
    return nvfp4_weight(weight.codes.T.contiguous().T, scale, weight.global_decode_scale)


def build_cases(every_byte: PackedWeight) -> dict[str, tuple[PackedWeight, torch.dtype]]:
    cases = {}
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for N, K in SHAPES:
            cases[f"{N}x{K}-{kind}"] = random_packed_weight(N, K, seed=N), dtype
        cases[f"every_byte-{kind}"] = every_byte, dtype
        cases[f"strided-{kind}"] = strided(random_packed_weight(6, 64)), dtype
    # ModelOpt's global scales are no powers of two, so the product is rounded. The interpreter cuts where it converts
    # to bfloat16; test_dequantize.py has that case on the GPU.
    for dtype in DTYPES[1:]:
        cases[f"rounded-{str(dtype).removeprefix('torch.')}"] = (
            with_global(random_packed_weight(5, 1040), 0.0123),
            dtype,
        )
    cases["subnormal-float32"] = with_global(every_byte, 2.0**-130), torch.float32
    return cases


def siblings() -> list[PackedWeight]:
    """Rows below, above and at a multiple of a program's, each weight with its own global scale."""
    return [with_global(random_packed_weight(N, 1040, seed=N), 2.0**-N) for N in (5, 9, 16)]


def stacked(dtype: torch.dtype) -> tuple:
    """Three weights of two rows on top of each other, each with a global scale: one program decodes all of them."""
    weight = random_packed_weight(6, 1040)
    return weight.codes, weight.block_scale.view(torch.uint8), torch.tensor([0.5, 3.0, 2.0**-9]), dtype


SIBLINGS = [(count, dtype) for count in (2, 3) for dtype in DTYPES]
NAMES = list(build_cases(random_packed_weight(1, 16)))


@pytest.fixture(scope="module")
def decoded(every_byte, interpreted):
    """Case -> (weight, dtype, what the kernel made of it)."""
    cases = build_cases(every_byte)
    stacks = [stacked(dtype) for dtype in DTYPES]
    alone = [*(arguments(*case) for case in cases.values()), *stacks]
    launches = [([case[:-1]], case[-1]) for case in alone]
    launches += [([arguments(one, dtype)[:-1] for one in siblings()[:count]], dtype) for count, dtype in SIBLINGS]
    outputs = interpreted("verl_qerl.kernels.actor.dequantize", launches)
    found = {name: (*case, out) for (name, case), out in zip(cases.items(), outputs, strict=False)}
    return found | {"stacked": outputs[len(cases) : len(alone)], "siblings": outputs[len(alone) :]}


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_gives_the_bits_of_the_reference(name, decoded):
    weight, dtype, out = decoded[name]
    expected = reference.dequantize(weight, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize("i", range(len(DTYPES)), ids=map(str, DTYPES))
def test_stacked_weights_have_their_own_global_scales(decoded, i):
    codes, scale, decode_scales, dtype = stacked(DTYPES[i])
    rows = [slice(2 * g, 2 * g + 2) for g in range(3)]
    weights = [nvfp4_weight(codes[r], scale[r].view(torch.float8_e4m3fn), decode_scales[g]) for g, r in enumerate(rows)]
    expected = torch.cat([reference.dequantize(weight, dtype) for weight in weights])
    assert torch.equal(decoded["stacked"][i], expected)
    assert torch.equal(dequantize_nvfp4(codes, scale, decode_scales, dtype), expected)


@pytest.mark.parametrize("i", range(len(SIBLINGS)), ids=[f"{count}-{dtype}" for count, dtype in SIBLINGS])
def test_siblings_are_decoded_in_one_launch(decoded, i):
    count, dtype = SIBLINGS[i]
    weights = siblings()[:count]
    expected = [reference.dequantize(weight, dtype) for weight in weights]
    assert torch.equal(decoded["siblings"][i], torch.cat(expected))
    found = dequantize_siblings([arguments(weight, dtype)[:-1] for weight in weights], dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_every_tile_has_a_shape():
    assert {kernel._tile(K // 16) for _, K in SHAPES} == set(kernel._TILES)


def test_every_byte_is_every_value(every_byte):
    assert len(torch.unique(every_byte.block_scale.view(torch.uint8))) == 127
    assert torch.isfinite(every_byte.block_scale.float()).all()
    assert len(torch.unique(every_byte.codes)) == 256


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operator_is_the_reference_without_a_gpu(dtype, every_byte):
    assert torch.equal(dequantize_nvfp4(*arguments(every_byte, dtype)), reference.dequantize(every_byte, dtype))


def test_the_operator_can_be_traced():
    torch.library.opcheck(dequantize_nvfp4, arguments(random_packed_weight(3, 48), torch.bfloat16))
