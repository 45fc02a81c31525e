"""NVFP4 in plain torch, and what any packed weight stands for: the specification every kernel is tested against."""

from collections.abc import Mapping

import torch

from verl_qerl.formats.base import PackedWeight, chunk_rows
from verl_qerl.formats.nvfp4 import DEFAULT_SCALE, NVFP4


def quantize(weight: torch.Tensor, scale: str = DEFAULT_SCALE, name: str = "weight") -> PackedWeight:
    """Quantize one weight to NVFP4. See `quantize_group`."""
    return quantize_group({name: weight}, scale)[name]


def quantize_group(weights: Mapping[str, torch.Tensor], scale: str = DEFAULT_SCALE) -> dict[str, PackedWeight]:
    """Quantize weights that a kernel multiplies as one (q, k, v; gate, up) to NVFP4.

    Args:
        weights: name -> [N, K] floating point, K % 16 == 0; N may differ.
        scale: How the scale of each block is chosen; see `NVFP4`.

    Returns:
        name -> weight on its device, all with one global scale, a power of two.

    Raises:
        ValueError: Unknown `scale`, a K that is no multiple of 16, or NaN or infinite values.
    """
    return NVFP4(scale=scale).quantize_group(weights)


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight [N, K] of `dtype`, on its device; see `WeightFormat.dequantize`."""
    return weight.form.dequantize(weight.tensors, dtype)


def relative_error(weight: torch.Tensor, packed: PackedWeight) -> float:
    """||dequantize(packed) - weight|| / ||weight||, Frobenius norms; 0 for a zero weight."""
    rows = chunk_rows(weight)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for i in range(0, weight.shape[0], rows):
        original = weight[i : i + rows].double()
        part = [tensor[i : i + rows] if tensor.ndim else tensor for tensor in packed.tensors]
        error = packed.form.dequantize(part, torch.float32).double() - original
        squares += torch.stack([x.square().sum() for x in (error, original)])
    error, norm = squares.sqrt().tolist()
    return error / norm if norm > 0 else 0.0
