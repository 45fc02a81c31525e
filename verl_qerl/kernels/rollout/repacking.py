"""Repacking: the layout in which `kernels.rollout.w4a16_matmul` reads an NVFP4 weight, and its decoding to bf16.

A rollout holds one packed copy. Tensor cores want each 64 x 16 tile as the fragments of their instruction; large
batches want a dense matrix for cuBLAS, made from the same bytes. Words and scales lie as those of humming do (0.1.6:
utils/weight.py), on which vLLM depends:

    tile (k // 16, n // 64), lane (n % 8) * 4 + (k % 8) // 2, word (n % 64) // 16
    half k % 2 of that 32-bit word, code (k % 16) // 8 * 2 + (n % 16) // 8 of that half
    block scale of (n, k // 16) at [k // 16, n // 64 * 64 + n % 8 * 8 + n % 64 // 8]

Bits of a code (sign, two of the exponent, one of the mantissa) lie where a mask and a shift make a bf16 of them, the
fourth of a half where the others leave room; nibbles would take a mask more each:

    code 0: 15, 8, 7, 6    code 1: 12, 5, 4, 3    code 2: 9, 2, 1, 0    code 3: 13, 11, 10, 14
"""

from typing import Any

import torch
import triton
import triton.language as tl

from verl_qerl.formats import PackedWeight, reference
from verl_qerl.formats.nvfp4 import nvfp4_weight

Repacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, scale, global_decode_scale

ROWS, COLUMNS = 64, 16  # of a tile
_CODES = 4  # of half a word
_PLACES = [(half, code) for half in range(2) for code in range(_CODES)]
# Repacked at a time. It runs in the memory of sleep mode, and what is free of that when loading ends vLLM
# unmaps while torch still counts it (vllm_plugin/decode/memory_share.py).
_WORDS_AT_ONCE = 1 << 20
_DEPTH, _WARPS = 8, 4  # tiles along K that a program decodes


def repack(weight: PackedWeight) -> Repacked:
    """Arrange a weight as the kernels read it.

    Args:
        weight: [N, K], N % 64 == 0, K % 16 == 0.

    Returns:
        Codes [K / 16, 2 N] int32, the bytes of block scales [K / 16, N] uint8, and the global scale, [1] float32.
    """
    N, K = weight.shape
    packed_codes = torch.empty((K // COLUMNS, N * 2), dtype=torch.int32, device=weight.codes.device)
    at_once = max(1, _WORDS_AT_ONCE // (2 * N))
    for rows, codes in zip(packed_codes.split(at_once), weight.codes.split(at_once * COLUMNS // 2, 1), strict=True):
        _pack(codes, rows)
    scale = weight.block_scale.view(torch.uint8).T.reshape(K // COLUMNS, N // ROWS, 8, 8).transpose(2, 3)
    return packed_codes, scale.reshape(K // COLUMNS, N).contiguous(), weight.global_decode_scale.reshape(1)


def _pack(codes: torch.Tensor, packed_codes: torch.Tensor) -> None:
    """Write the 32-bit words [blocks, 2 N] int32 of codes [N, blocks * 8] uint8, two each."""
    blocks, N = len(packed_codes), len(codes)
    single = torch.stack((codes & 15, codes >> 4), dim=-1)
    # n = (tile, word, half, lane row), k = (tile, half, lane column, parity)
    single = single.view(N // ROWS, 4, 2, 8, blocks, 2, 4, 2).permute(4, 0, 3, 6, 1, 7, 5, 2)
    single = single.reshape(blocks, N * 2, 2, _CODES)
    packed_codes.zero_()
    for half, code in _PLACES:
        packed_codes |= _spread(single[:, :, half, code], code) << (16 * half)


def undo_repack(packed_codes: torch.Tensor, scale: torch.Tensor, global_decode_scale: torch.Tensor) -> PackedWeight:
    """The inverse of `repack`."""
    num_blocks, N = scale.shape
    codes = torch.stack([_gather(packed_codes >> (16 * half), code) for half, code in _PLACES], dim=-1)
    codes = codes.view(num_blocks, N // ROWS, 8, 4, 4, 2, 2, 2)
    codes = codes.permute(1, 4, 7, 2, 0, 6, 3, 5).reshape(N, num_blocks * COLUMNS // 2, 2)
    blocks = scale.view(num_blocks, N // ROWS, 8, 8).transpose(2, 3).reshape(num_blocks, N)
    block_scale = blocks.T.contiguous().view(torch.float8_e4m3fn)
    return nvfp4_weight(codes[..., 0] | codes[..., 1] << 4, block_scale, global_decode_scale)


def _spread(nibble: torch.Tensor, code: int) -> torch.Tensor:
    """Codes, uint8, as bits of half a word in int32."""
    bits = nibble.int()
    if code == _CODES - 1:
        return ((bits & 8) << 10) | ((bits & 6) << 9) | ((bits & 1) << 14)
    return (((bits & 8) << 12) | ((bits & 7) << 6)) >> (3 * code)


def _gather(half: torch.Tensor, code: int) -> torch.Tensor:
    """The inverse of `_spread`; what else the half has is left out."""
    if code == _CODES - 1:
        bits = ((half >> 10) & 8) | ((half >> 9) & 6) | ((half >> 14) & 1)
    else:
        bits = ((half >> (12 - 3 * code)) & 8) | ((half >> (6 - 3 * code)) & 7)
    return bits.to(torch.uint8)


def decode(
    packed_codes: torch.Tensor, scale: torch.Tensor, global_decode_scale: torch.Tensor, more_columns: int = 0
) -> torch.Tensor:
    """Decode a repacked weight.

    Args:
        packed_codes: [K / 16, 2 N] int32, of `repack`; or a slice of its columns, of rows from a multiple of 64 on.
        scale: [K / 16, N] uint8, of the same rows.
        global_decode_scale: One float32.
        more_columns: Behind those of the weight, for the caller to write.

    Returns:
        [N, K + more_columns] bf16, the first K bit for bit as `formats.reference.dequantize` of the weight.
    """
    if packed_codes.is_cuda:
        return launch(packed_codes, scale, global_decode_scale, more_columns)
    dense = reference.dequantize(undo_repack(packed_codes, scale, global_decode_scale), torch.bfloat16)
    return torch.nn.functional.pad(dense, (0, more_columns), value=torch.nan) if more_columns else dense


def launch(
    packed_codes: torch.Tensor, scale: torch.Tensor, global_decode_scale: torch.Tensor, more_columns: int = 0
) -> torch.Tensor:
    """Run the Triton kernel; shapes as in `decode`."""
    num_blocks, N = scale.shape
    if packed_codes.stride(1) != 1 or scale.stride(1) != 1:
        raise ValueError(
            f"columns of a repacked weight are not side by side: strides {packed_codes.stride()}, {scale.stride()}."
        )
    # Rows from multiples of 32 bytes on, so that 16 are stored at once.
    width = num_blocks * COLUMNS + triton.cdiv(more_columns, 16) * 16
    out = torch.empty((N, width), dtype=torch.bfloat16, device=packed_codes.device)
    grid = (N // ROWS, triton.cdiv(num_blocks, _DEPTH))
    shape: Any = {"DEPTH": _DEPTH, "num_warps": _WARPS}
    strides = packed_codes.stride(0), scale.stride(0), out.stride(0)
    _dequantize_kernel[grid](packed_codes, scale, global_decode_scale, out, *strides, num_blocks, **shape)
    return out[:, : num_blocks * COLUMNS + more_columns]


@triton.jit
def _dequantize_kernel(
    words_ptr, scale_ptr, global_ptr, out_ptr, words_stride, scale_stride, out_stride, num_blocks, DEPTH: tl.constexpr
):
    tile_n = tl.program_id(0)
    first = tl.program_id(1) * DEPTH
    block = (first + tl.arange(0, DEPTH)).to(tl.int64)
    in_k = (block < num_blocks)[:, None]

    # [DEPTH, 128 words of the tile] -> [DEPTH, 128, 8 codes]
    place = tl.arange(0, 128)
    words = tl.load(words_ptr + block[:, None] * words_stride + tile_n * 128 + place[None, :], mask=in_k, other=0)
    which = tl.arange(0, 8)[None, None, :]
    half = words[:, :, None] >> (which // 4 * 16)
    # e2m1 in half: sign to bit 15, exponent and mantissa to bits 9-11.
    moved = half << (which % 4 * 3)
    fourth = ((half & 0x2000) << 2) | (half & 0x0C00) | ((half & 0x4000) >> 5)
    bits = tl.where(which % 4 == 3, fourth, (moved & 0x8000) | ((moved & 0x01C0) << 3))
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)

    entry = tl.arange(0, 64)
    bits = tl.load(scale_ptr + block[:, None] * scale_stride + tile_n * 64 + entry[None, :], mask=in_k, other=0)
    # e4m3 in half: exponent and mantissa one bit further left than e4m3's own place, times 2**8 for the bias.
    decoded = (bits.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    decoded = decoded * (tl.load(global_ptr) * 4194304.0)  # 2**22 = 2**8 and 2**14 for e2m1's bias

    # value: (block, lane row, lane column, word, parity, half of k, half of n)
    # scale: (block, lane row, word, half of n)
    value = tl.reshape(value, (DEPTH, 8, 4, 4, 2, 2, 2))
    decoded = tl.reshape(decoded, (DEPTH, 8, 1, 4, 1, 1, 2))
    value = value * decoded
    value = tl.permute(value, (3, 6, 1, 0, 5, 2, 4))
    value = tl.reshape(value, (64, DEPTH * 16))

    row = (tile_n * 64 + tl.arange(0, 64)).to(tl.int64)
    column = first * 16 + tl.arange(0, DEPTH * 16)
    tl.store(
        out_ptr + row[:, None] * out_stride + column[None, :],
        value.to(tl.bfloat16),
        mask=(column < num_blocks * 16)[None, :],
    )
