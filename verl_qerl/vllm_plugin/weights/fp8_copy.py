"""FP8 arithmetic for many rows (`arithmetic=fp8`): an E4M3 copy of a packed weight, activations quantized per token.

    y[m, n] = a[m] * b[n] * sum_k e4m3(x[m, k] / a[m]) * codes[n, k]        a[m] = max_k |x[m, k]| / 448

b[n] is a power of two, so that products of a block scale and the codes 0, 0.5, 1, 2 and 4 are E4M3 numbers; those with
1.5, 3 and 6 are rounded where they need more than three bits. The copy of Gaussian weights is 2.0 % from the packed
ones (of any max |w| / 448 as scale: 2.7 %), a product 3.3 %, of which the activations alone make 2.6 %.
"""

import torch

from verl_qerl.formats.base import power_of_two
from verl_qerl.formats.fp8 import FP8
from verl_qerl.kernels.rollout.repacking import ROWS, Repacked, dequantize_repacked

FEWEST_ROWS = 64  # of x; with fewer, the packed weight is read faster than its copy of twice its size
_WEIGHTS_AT_ONCE = 1 << 24  # decoded to bf16 at a time
_LEAST_EXPONENT = -100  # of a row of zeros


def make_copy(words: torch.Tensor, scale: torch.Tensor, global_decode_scale: torch.Tensor) -> list[torch.Tensor]:
    """Decode a weight to E4M3.

    Args:
        words: Codes of `kernels.rollout.repacking.repack`, [K / 16, 2 N] int32.
        scale: Of there, [K / 16, N] uint8.
        global_decode_scale: [1] float32.

    Returns:
        Codes [N, K] float8_e4m3fn and scales [N, 1] float32, powers of two.
    """
    num_blocks, N = scale.shape
    codes = torch.empty((N, num_blocks * 16), dtype=torch.float8_e4m3fn, device=words.device)
    scales = torch.empty((N, 1), dtype=torch.float32, device=words.device)
    step = max(1, _WEIGHTS_AT_ONCE // codes.shape[1] // ROWS) * ROWS
    for start in range(0, N, step):
        end = min(start + step, N)
        part: Repacked = (words[:, 2 * start : 2 * end], scale[:, start:end], global_decode_scale)
        codes[start:end], scales[start:end] = quantize_rows(dequantize_repacked(*part))
    return [codes, scales]


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [N, K] of finite numbers.

    Returns:
        Codes [N, K] float8_e4m3fn and scales [N, 1] float32: for each row the smallest power of two with which its
        largest magnitude is at most 448.
    """
    rows = rows.float()
    # amax = mantissa * 2**exponent with a mantissa in [1/2, 1), and 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(rows.abs().amax(dim=1, keepdim=True))
    exponent = torch.where(mantissa > 0.875, exponent - 8, exponent - 9)
    exponent = exponent.masked_fill(mantissa == 0, _LEAST_EXPONENT).clamp(min=_LEAST_EXPONENT)
    return (rows * power_of_two(-exponent)).to(torch.float8_e4m3fn), power_of_two(exponent)


def takes_fp8(rows: int, fp8_copy: list[torch.Tensor]) -> bool:
    """Whether so many rows go through a copy, which is empty where there is none."""
    return bool(fp8_copy) and rows >= FEWEST_ROWS


def multiply_fp8(x: torch.Tensor, fp8_copy: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """X W^T + bias in FP8; without a GPU the same numbers are multiplied in float32.

    Args:
        x: [M, K] bf16, contiguous.
        fp8_copy: Of `make_copy`, N and K multiples of 16.
        bias: [N] bf16 or None.

    Returns:
        [M, N] bf16.
    """
    codes, scales = fp8_copy
    if not x.is_cuda:
        rows, of_rows = FP8.quantize_rows(x)
        y = rows.float() @ codes.float().T * of_rows * scales.T
        return (y if bias is None else y + bias.float()).to(x.dtype)
    from vllm import _custom_ops as ops  # needs vLLM's CUDA kernels

    rows, of_rows = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return ops.cutlass_scaled_mm(rows, codes.t(), of_rows, scales, x.dtype, bias)
