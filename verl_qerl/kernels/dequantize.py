"""Packed NVFP4 weight -> dense matrix, as one opaque operator.

Bound by memory: 9/16 byte read and two written a weight. Both E2M1 and E4M3 are decoded by moving their bits into the
exponent and mantissa of a half, subnormals included, so that one kernel serves GPUs with and without native FP8.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from verl_qerl.nvfp4 import reference
from verl_qerl.nvfp4.format import BLOCK_SIZE, PackedWeight

# Rows and blocks of 16 a program decodes: of eleven tried on an H200, the best balance of small and large linears
# (tests/bench/results).
_ROWS, _BLOCKS, _WARPS = 8, 32, 4


@torch.library.custom_op("verl_qerl::dequantize_nvfp4", mutates_args=())
def dequantize_nvfp4(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Decode an NVFP4 weight; the operator behind `dequantize`.

    Args:
        codes: [N, K / 2] uint8.
        block_scale: [N, K / 16] uint8, the bytes of float8_e4m3fn.
        global_decode_scale: [] or [G] float32: weights stacked along N, each of N / G rows, have a scale each.
        dtype: Of the result.

    Returns:
        [N, K] of `dtype`.
    """
    scales = global_decode_scale.reshape(-1)
    parts = zip(codes.chunk(len(scales)), block_scale.view(torch.float8_e4m3fn).chunk(len(scales)), scales, strict=True)
    decoded = [reference.dequantize(PackedWeight(*part), dtype) for part in parts]
    return decoded[0] if len(decoded) == 1 else torch.cat(decoded)


@dequantize_nvfp4.register_kernel("cuda")
def _dequantize_cuda(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return launch(codes, block_scale, global_decode_scale, dtype)


@dequantize_nvfp4.register_fake
def _dequantize_fake(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=dtype)


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode an NVFP4 weight, bit for bit as `nvfp4.reference.dequantize`.

    Args:
        weight: [N, K].
        dtype: bfloat16, float16 or float32.

    Returns:
        [N, K] of `dtype` on the weight's device.
    """
    return dequantize_nvfp4(weight.codes, weight.block_scale.view(torch.uint8), weight.global_decode_scale, dtype)


def launch(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Run the Triton kernel; shapes as in `dequantize_nvfp4`, every tensor on one device."""
    N, half_k = codes.shape
    codes, block_scale = codes.contiguous(), block_scale.contiguous()  # the kernel knows no strides
    out = torch.empty((N, half_k * 2), dtype=dtype, device=codes.device)
    num_blocks = half_k * 2 // BLOCK_SIZE
    grid = (triton.cdiv(N, _ROWS), triton.cdiv(num_blocks, _BLOCKS))
    num_scales = global_decode_scale.numel()
    tile: Any = {"ROWS": _ROWS, "BLOCKS": _BLOCKS, "PER": N // num_scales if num_scales > 1 else 0}
    tile["num_warps"] = _WARPS  # Triton's, not the kernel's
    _dequantize_kernel[grid](codes, block_scale, global_decode_scale, out, N, num_blocks, **tile)
    return out


@triton.jit
def _dequantize_kernel(
    code_ptr, scale_ptr, global_ptr, out_ptr, N, num_blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PER: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # PER: rows of each global scale, 0 where there is one.
    global_scale = tl.load(global_ptr + (tl.minimum(row, N - 1) // PER)[:, None]) if PER else tl.load(global_ptr)
    row = row.to(tl.int64)
    first = tl.program_id(1) * BLOCKS
    in_rows = (row < N)[:, None]

    block = first + tl.arange(0, BLOCKS)
    scale_bits = tl.load(
        scale_ptr + row[:, None] * num_blocks + block[None, :], mask=in_rows & (block < num_blocks)[None, :], other=0
    )
    # e4m3 in half: exponent and mantissa one bit further left than e4m3's own place, times 2**8 for the bias.
    scale = (scale_bits.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    # 2**22 = 2**8 for e4m3's bias and 2**14 for e2m1's.
    scale = scale * (global_scale * 4194304.0)

    byte = first * 8 + tl.arange(0, BLOCKS * 8)
    packed = tl.load(
        code_ptr + row[:, None] * (num_blocks * 8) + byte[None, :],
        mask=in_rows & (byte < num_blocks * 8)[None, :],
        other=0,
    ).to(tl.int16)
    # e2m1 in half: sign to bit 15, exponent and mantissa to bits 9-11.
    low = (((packed & 8) << 12) | ((packed & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
    high = (((packed & 128) << 8) | ((packed & 112) << 5)).to(tl.float16, bitcast=True).to(tl.float32)
    per_byte = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, BLOCKS, 8)), (ROWS, BLOCKS * 8))
    value = tl.interleave(low * per_byte, high * per_byte)

    column = first * 16 + tl.arange(0, BLOCKS * 16)
    tl.store(
        out_ptr + row[:, None] * (num_blocks * 16) + column[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=in_rows & (column < num_blocks * 16)[None, :],
    )
