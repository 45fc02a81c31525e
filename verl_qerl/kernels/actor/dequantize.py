"""Packed NVFP4 weight -> dense matrix, as one opaque operator.

Bound by memory: 9/16 byte read and two written a weight. Both E2M1 and E4M3 are decoded by moving their bits into the
exponent and mantissa of a half, subnormals included, so that one kernel serves GPUs with and without native FP8.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from verl_qerl.formats import NVFP4
from verl_qerl.formats.nvfp4 import BLOCK_SIZE
from verl_qerl.kernels.actor.triton_launch import TritonLauncher

# Rows and blocks of 16 that a program decodes, and its warps: the first that wastes little at the end of a row, else
# the last. Of those that were tried on an H200 (tests/bench/results) the fastest.
_TILES = ((1, 256, 4), (2, 64, 2), (8, 32, 4))
_WASTE = 1.2
_MOST = 3  # weights of a launch: q, k and v

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, block_scale and global_decode_scale


@torch.library.custom_op("verl_qerl::dequantize_nvfp4", mutates_args=())
def dequantize_nvfp4(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Decode an NVFP4 weight, bit for bit as `formats.reference.dequantize`.

    Args:
        codes: [N, K / 2] uint8.
        block_scale: [N, K / 16] uint8, the bytes of float8_e4m3fn.
        global_decode_scale: [] or [G] float32: weights stacked along N, each of N / G rows, have a scale each.
        dtype: bfloat16, float16 or float32.

    Returns:
        [N, K] of `dtype`.
    """
    if codes.is_cuda:
        return launch([(codes, block_scale, global_decode_scale)], dtype)
    scales = global_decode_scale.reshape(-1)
    parts = zip(codes.chunk(len(scales)), block_scale.view(torch.float8_e4m3fn).chunk(len(scales)), scales, strict=True)
    decoded = [NVFP4().dequantize(part, dtype) for part in parts]
    return decoded[0] if len(decoded) == 1 else torch.cat(decoded)


@dequantize_nvfp4.register_fake
def _dequantize_fake(
    codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=dtype)


def dequantize_siblings(weights: Sequence[Tensors], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Decode weights of one K, on a GPU in one launch; no operator, which would take the host longer than the launch.

    Args:
        weights: Up to three, (codes, block_scale, global_decode_scale) of each as of `dequantize_nvfp4`, with one
            global scale.

    Returns:
        [N_i, K] of `dtype`, each; on a GPU views of one tensor.
    """
    if torch.compiler.is_compiling() or not weights[0][0].is_cuda:
        return tuple(dequantize_nvfp4(*weight, dtype) for weight in weights)
    return launch(weights, dtype).split_with_sizes([codes.shape[0] for codes, *_ in weights])


def launch(weights: Sequence[Tensors], dtype: torch.dtype) -> torch.Tensor:
    """Run the Triton kernel once.

    Args:
        weights: Up to three of one K on one device, as of `dequantize_siblings`; or one as of `dequantize_nvfp4`.

    Returns:
        [sum of N, K] of `dtype`, one weight below the other.
    """
    rows, num_blocks = [codes.shape[0] for codes, *_ in weights], weights[0][1].shape[1]
    out = torch.empty((sum(rows), num_blocks * BLOCK_SIZE), dtype=dtype, device=weights[0][0].device)
    # The kernel knows no strides.
    tensors = [part for codes, scale, of_all in weights for part in (codes.contiguous(), scale.contiguous(), of_all)]
    missing, num_scales = _MOST - len(weights), weights[0][2].numel()
    tensors += [*tensors[:3] * missing, out]
    height, width, num_warps = _tile(num_blocks)
    grid = (sum(-(-N // height) for N in rows), -(-num_blocks // width))
    constants = (len(weights) > 1, rows[0] // num_scales if num_scales > 1 else 0, height, width)
    _dequantize(grid, tensors, (*rows, *[0] * missing, num_blocks), constants, num_warps)
    return out


def _tile(num_blocks: int) -> tuple[int, int, int]:
    """The entry of _TILES for rows of so many blocks."""
    fitting = (tile for tile in _TILES if -(-num_blocks // tile[1]) * tile[1] <= _WASTE * num_blocks)
    return next(fitting, _TILES[-1])


@triton.jit
def _load_scales(scale_ptr, global_ptr, row, N, first, num_blocks, PER: tl.constexpr, BLOCKS: tl.constexpr):
    # PER: rows of each global scale, 0 where there is one.
    global_scale = tl.load(global_ptr + (tl.minimum(row, N - 1) // PER)[:, None]) if PER else tl.load(global_ptr)
    block = first + tl.arange(0, BLOCKS)
    at = scale_ptr + row.to(tl.int64)[:, None] * num_blocks + block[None, :]
    bits = tl.load(at, mask=(row < N)[:, None] & (block < num_blocks)[None, :], other=0)
    # e4m3 in half: exponent and mantissa one bit further left than e4m3's own place, times 2**8 for the bias.
    scale = (bits.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    # 2**22 = 2**8 for e4m3's bias and 2**14 for e2m1's.
    return scale * (global_scale * 4194304.0)


@triton.jit
def _load_codes(code_ptr, row, N, first, num_blocks, BLOCKS: tl.constexpr):
    byte = first * 8 + tl.arange(0, BLOCKS * 8)
    at = code_ptr + row.to(tl.int64)[:, None] * (num_blocks * 8) + byte[None, :]
    packed = tl.load(at, mask=(row < N)[:, None] & (byte < num_blocks * 8)[None, :], other=0).to(tl.int16)
    # e2m1 in half: sign to bit 15, exponent and mantissa to bits 9-11.
    low = (((packed & 8) << 12) | ((packed & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
    high = (((packed & 128) << 8) | ((packed & 112) << 5)).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit(do_not_specialize=["N", "second_N", "third_N"])  # of two types where one is 1, and one of them is taken
def _dequantize_kernel(
    code_ptr,
    scale_ptr,
    global_ptr,
    second_code_ptr,
    second_scale_ptr,
    second_global_ptr,
    third_code_ptr,
    third_scale_ptr,
    third_global_ptr,
    out_ptr,
    N,
    second_N,
    third_N,
    num_blocks,
    SEVERAL: tl.constexpr,
    PER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tile, first = tl.program_id(0), tl.program_id(1) * BLOCKS
    start = tile * 0  # row of the result where this weight starts
    if SEVERAL:
        second = tl.cdiv(N, ROWS)
        third = second + tl.cdiv(second_N, ROWS)
        if tile >= third:
            code_ptr, scale_ptr, global_ptr = third_code_ptr, third_scale_ptr, third_global_ptr
            tile, start, N = tile - third, N + second_N, third_N
        elif tile >= second:
            code_ptr, scale_ptr, global_ptr = second_code_ptr, second_scale_ptr, second_global_ptr
            tile, start, N = tile - second, N, second_N
    row, column = tile * ROWS + tl.arange(0, ROWS), first * 16 + tl.arange(0, BLOCKS * 16)
    scale = _load_scales(scale_ptr, global_ptr, row, N, first, num_blocks, PER, BLOCKS)
    low, high = _load_codes(code_ptr, row, N, first, num_blocks, BLOCKS)
    per_byte = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, BLOCKS, 8)), (ROWS, BLOCKS * 8))
    value = tl.interleave(low * per_byte, high * per_byte).to(out_ptr.dtype.element_ty)
    at = out_ptr + (start + row).to(tl.int64)[:, None] * (num_blocks * 16) + column[None, :]
    # .cs: what is read once, and is larger than the L2 cache but for small weights.
    tl.store(at, value, mask=(row < N)[:, None] & (column < num_blocks * 16)[None, :], cache_modifier=".cs")


_dequantize = TritonLauncher(_dequantize_kernel)
