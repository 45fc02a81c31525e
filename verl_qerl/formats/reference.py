"""What a packed weight stands for, in plain torch: the specification every kernel is tested against."""

import torch

from verl_qerl.formats.base import PackedWeight, chunk_rows


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
