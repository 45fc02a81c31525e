"""The layout against its formula, and the Triton kernel in Triton's interpreter (a process of its own)."""

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.formats import PackedWeight, reference
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.kernels.rollout import repacking
from verl_qerl.kernels.rollout.repacking import Repacked, decode, launch, repack, undo_repack

MODULE = "verl_qerl.kernels.rollout.repacking"
# Of sign, exponent, exponent and mantissa in half a word, for each of its four codes.
BITS = torch.tensor([(15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14)], dtype=torch.int32)
SHAPES = [(64, 16), (64, 128), (128, 144), (192, 272)]  # a program decodes 8 blocks of 16: below, at and above it


@pytest.fixture(scope="module")
def every_pair() -> PackedWeight:
    """[128, 512]: every finite E4M3 byte (one twice) times every byte of two codes."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    scale = torch.arange(128, dtype=torch.uint8).clamp(max=126)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    return nvfp4_weight(codes, scale, torch.tensor(2.0**-12))


def test_every_code_and_scale_is_where_the_formula_says():
    weight = random_packed_weight(128, 48)
    words, scale, decode_scale = repack(weight)
    n, k = torch.meshgrid(torch.arange(128), torch.arange(48), indexing="ij")
    word = words[k // 16, n // 64 * 128 + (n % 8 * 4 + k % 8 // 2) * 4 + n % 64 // 16]
    half, code = word >> (k % 2 * 16), k % 16 // 8 * 2 + n % 16 // 8
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).view(128, 48)
    found = sum((half >> BITS[code, bit] & 1) << (3 - bit) for bit in range(4))
    assert torch.equal(found, codes.int())
    found = scale[k // 16, n // 64 * 64 + n % 8 * 8 + n % 64 // 8]
    assert torch.equal(found, weight.block_scale.view(torch.uint8).repeat_interleave(16, 1))
    assert torch.equal(decode_scale, weight.global_decode_scale.reshape(1))


@pytest.mark.parametrize("at_once", [1, 5 * 256, 1 << 20])  # words: less than a block of 16, five blocks, all
def test_parts_are_arranged_as_the_whole_is(at_once, monkeypatch):
    weight = random_packed_weight(128, 17 * 16)
    whole = repack(weight)
    asked, pack = [], repacking._pack
    monkeypatch.setattr(repacking, "_WORDS_AT_ONCE", at_once)
    monkeypatch.setattr(repacking, "_pack", lambda codes, words: (asked.append(len(words)), pack(codes, words)))
    assert all(torch.equal(*pair) for pair in zip(whole, repack(weight), strict=True))
    assert asked == {1: [1] * 17, 5 * 256: [5, 5, 5, 2], 1 << 20: [17]}[at_once]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_undo_repack_is_the_inverse(shape):
    weight = random_packed_weight(*shape)
    back = undo_repack(*repack(weight))
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.block_scale.view(torch.uint8), weight.block_scale.view(torch.uint8))
    assert torch.equal(back.global_decode_scale, weight.global_decode_scale)


def test_without_a_gpu_it_is_the_reference(every_pair):
    assert torch.equal(decode(*repack(every_pair)), reference.dequantize(every_pair, torch.bfloat16))


def test_the_kernel_gives_the_bits_of_the_reference(every_pair, interpreted):
    weights = [random_packed_weight(*shape) for shape in SHAPES] + [every_pair]
    found = interpreted(MODULE, [repack(weight) for weight in weights])
    for weight, out in zip(weights, found, strict=True):
        expected = reference.dequantize(weight, torch.bfloat16)
        assert torch.equal(out, expected)
        assert torch.equal(out.signbit(), expected.signbit())


def columns(case: Repacked, start: int, end: int) -> Repacked:
    """The tiles of some rows of a weight, in place."""
    words, scale, decode_scale = case
    return words[:, 2 * start : 2 * end], scale[:, start:end], decode_scale


PARTS = [(0, 64), (64, 192), (192, 256)]


def test_rows_of_a_weight_are_columns_of_its_tiles():
    weight = random_packed_weight(256, 272)
    expected = reference.dequantize(weight, torch.bfloat16)
    for start, end in PARTS:
        part = columns(repack(weight), start, end)
        assert torch.equal(decode(*part), expected[start:end])
        back = undo_repack(*part)
        assert torch.equal(back.codes, weight.codes[start:end])
        assert torch.equal(back.block_scale.view(torch.uint8), weight.block_scale.view(torch.uint8)[start:end])


def test_the_kernel_decodes_columns_in_place(interpreted):
    weight = random_packed_weight(256, 272)
    found = interpreted(MODULE, [columns(repack(weight), *part) for part in PARTS])
    expected = reference.dequantize(weight, torch.bfloat16)
    for (start, end), out in zip(PARTS, found, strict=True):
        assert torch.equal(out, expected[start:end])


def test_more_columns_are_left_to_the_caller(interpreted):
    weight = random_packed_weight(128, 272)
    (by_kernel,) = interpreted(MODULE, [(*repack(weight), 24)])
    for out in (by_kernel, decode(*repack(weight), 24)):
        assert out.shape == (128, 272 + 24)
        assert torch.equal(out[:, :272], reference.dequantize(weight, torch.bfloat16))


def test_the_kernel_refuses_columns_that_are_apart():
    words, scale, decode_scale = repack(random_packed_weight(128, 32))
    with pytest.raises(ValueError, match="are not side by side: strides"):
        launch(words[:, ::2], scale[:, ::2], decode_scale)
