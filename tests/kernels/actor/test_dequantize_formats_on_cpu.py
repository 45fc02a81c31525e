"""The Triton kernels in Triton's interpreter, in a process of its own: the variable that starts it acts on import."""

import pytest
import torch

from verl_qerl.formats import get_format
from verl_qerl.kernels.actor.dequantize_formats import dequantize_format

FORMS = ("fp8", "int8", "mxfp4")
# A program decodes 4 rows of 512 bytes: below, at, just above and between multiples, one row, one block, odd numbers.
SHAPES = [(1, 32), (1, 512), (3, 96), (4, 1024), (5, 1056), (9, 1568), (64, 160)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def quantized(name: str, N: int, K: int) -> tuple[torch.Tensor, ...]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(N))
    return get_format(name).quantize(weight).tensors


def every_code(name: str) -> tuple[torch.Tensor, ...]:
    """Every byte that stands for numbers, with scales from the smallest to the largest that quantizers write."""
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "fp8":
        codes = codes[codes & 0x7F != 0x7F]  # without NaN
    if name == "mxfp4":
        exponents = torch.arange(2, 253, dtype=torch.uint8)[:, None].repeat(1, 16)
        return codes.repeat(len(exponents), 1), exponents
    scales = torch.tensor([[2.0**-126], [0.0123], [1.0], [3.7]])
    dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
    return codes.repeat(4, 1).view(dtype), scales


def build_cases() -> dict[str, tuple[str, tuple[torch.Tensor, ...], torch.dtype]]:
    cases = {}
    for name in FORMS:
        for dtype in DTYPES:
            kind = str(dtype).removeprefix("torch.")
            # The interpreter cuts where it converts to bfloat16: products that are rounded are tested on the GPU.
            if dtype != torch.bfloat16 or name == "mxfp4":
                for N, K in SHAPES:
                    cases[f"{name}-{N}x{K}-{kind}"] = name, quantized(name, N, K), dtype
            # Products beyond half's numbers would depend on how an overflow is converted.
            if dtype == torch.float32 or (dtype == torch.bfloat16 and name == "mxfp4"):
                cases[f"{name}-every_code-{kind}"] = name, every_code(name), dtype
    strided = tuple(tensor.T.contiguous().T for tensor in quantized("int8", 6, 64))
    cases["int8-strided"] = "int8", strided, torch.float32
    return cases


NAMES = list(build_cases())


@pytest.fixture(scope="module")
def decoded(interpreted):
    """Case -> (format, tensors, dtype, what the kernel made of them)."""
    cases = build_cases()
    launches = [(name, *tensors, dtype) for name, tensors, dtype in cases.values()]
    outputs = interpreted("verl_qerl.kernels.actor.dequantize_formats", launches)
    return {name: (*case, out) for (name, case), out in zip(cases.items(), outputs, strict=True)}


@pytest.mark.parametrize("case", NAMES)
def test_the_kernel_gives_the_bits_of_the_format(case, decoded):
    name, tensors, dtype, out = decoded[case]
    expected = get_format(name).dequantize(tensors, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize("name", FORMS)
def test_without_a_gpu_it_is_the_format(name):
    tensors = quantized(name, 5, 96)
    for dtype in (*DTYPES, torch.float64):
        expected = get_format(name).dequantize(tensors, dtype)
        assert torch.equal(dequantize_format(get_format(name), tensors, dtype), expected)
