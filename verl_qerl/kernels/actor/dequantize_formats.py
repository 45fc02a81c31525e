"""Packed INT8, FP8 and MXFP4 weights -> dense matrices, bit for bit as `WeightFormat.dequantize`.

On a GPU one pass: a byte (MXFP4: 17/32) read and two written a weight, where the torch expressions write float32 first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from verl_qerl.formats import WeightFormat
from verl_qerl.formats.mxfp4 import BLOCK_SIZE

_ROWS, _BYTES, _WARPS = 4, 512, 4  # that a program reads


def dequantize_format(
    form: WeightFormat, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Decode a weight of INT8, FP8 or MXFP4.

    Args:
        tensors: `PackedWeight.tensors` of a weight [N, K], on one device.
        dtype: bfloat16, float16 or float32 (elsewhere than on a GPU: any).

    Returns:
        [N, K] of `dtype`: a product in float32, rounded once.
    """
    codes, scale = tensors
    return launch(form.name, codes, scale, dtype) if codes.is_cuda else form.dequantize(tensors, dtype)


def launch(name: str, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run the Triton kernel of the format `name`; see `dequantize_format`."""
    N, num_bytes = codes.shape
    K = num_bytes * 2 if name == "mxfp4" else num_bytes
    codes, scale = codes.contiguous().view(torch.uint8), scale.contiguous()  # the kernels know no strides
    out = torch.empty((N, K), dtype=dtype, device=codes.device)
    grid = (triton.cdiv(N, _ROWS), triton.cdiv(num_bytes, _BYTES))
    kernel, constants = _channel_kernel, {"IS_FLOAT": name == "fp8"}
    if name == "mxfp4":
        kernel, constants = _mxfp4_kernel, {"PER_SCALE": BLOCK_SIZE // 2}
    tile: Any = {**constants, "ROWS": _ROWS, "BYTES": _BYTES, "num_warps": _WARPS}
    kernel[grid](codes, scale, out, N, num_bytes, **tile)
    return out


@triton.jit
def _channel_kernel(
    code_ptr, scale_ptr, out_ptr, N, K, IS_FLOAT: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    mask = (row < N)[:, None] & (column < K)[None, :]
    place = row[:, None] * K + column[None, :]
    bits = tl.load(code_ptr + place, mask=mask, other=0).to(tl.int16)
    if IS_FLOAT:
        # e4m3 in half: sign to bit 15, exponent and mantissa one bit left of their own place, times 2**8 for the bias.
        value = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        value = ((bits ^ 128) - 128).to(tl.float32)  # two's complement of eight bits
    scale = tl.load(scale_ptr + row, mask=row < N, other=0.0)
    tl.store(out_ptr + place, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mxfp4_kernel(
    code_ptr, scale_ptr, out_ptr, N, num_bytes, PER_SCALE: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = (row < N)[:, None]
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    in_bytes = in_rows & (byte < num_bytes)[None, :]
    packed = tl.load(code_ptr + row[:, None] * num_bytes + byte[None, :], mask=in_bytes, other=0).to(tl.int16)
    # e2m1 in half: sign to bit 15, exponent and mantissa to bits 9-11, times 2**14 for the bias.
    low = (((packed & 8) << 12) | ((packed & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    high = (((packed & 128) << 8) | ((packed & 112) << 5)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0

    block = tl.program_id(1) * (BYTES // PER_SCALE) + tl.arange(0, BYTES // PER_SCALE)
    num_blocks = num_bytes // PER_SCALE
    in_blocks = in_rows & (block < num_blocks)[None, :]
    exponent = tl.load(scale_ptr + row[:, None] * num_blocks + block[None, :], mask=in_blocks, other=0)
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # E8M0 is float32's exponent
    per_byte = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, BYTES // PER_SCALE, PER_SCALE)), (ROWS, BYTES))
    value = tl.interleave(low * per_byte, high * per_byte)

    column = tl.program_id(1) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(
        out_ptr + row[:, None] * (2 * num_bytes) + column[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=in_rows & (column < 2 * num_bytes)[None, :],
    )
