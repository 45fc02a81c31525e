"""NVFP4 by GPTQ (Frantar et al. 2022, arXiv 2210.17323): codes that keep a linear's outputs on given inputs.

Scales are fixed first, as without inputs. Then columns are rounded one after the other, those with the largest inputs
first, and each takes up the errors of the columns before it. It is computed in the form of LDLQ, which gives the same
codes (Chee et al. 2023, arXiv 2307.13304, theorem 6) and needs no inverse: with the second moments of the inputs
H = (U + I) D (U + I)^T, U strictly upper triangular,

    target[:, k] = w[:, k] + sum_{i < k} (w[:, i] - q[:, i]) U[i, k]        q[:, k] = the nearest code to target[:, k]

Sums are matrix products here, so that a CPU and a GPU may differ in a few codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from verl_qerl.formats.base import PackedWeight
from verl_qerl.formats.e2m1 import e2m1_codes, pack_codes, to_e2m1
from verl_qerl.formats.nvfp4_layout import BLOCK_SIZE
from verl_qerl.formats.reference import dequantize

DAMPING = 0.01  # of the mean second moment, added to all of them; as in the paper
_COLUMNS = 128  # that are rounded before their errors are added to the rest in one product


class InputMoments:
    """Second moments X^T X / tokens of the inputs X [tokens, K] of a linear, as they come.

    Args:
        device: Where the inputs are, and a float32 matrix [K, K] is held.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        self._sum = torch.zeros(in_features, in_features, device=device)
        self._tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Count some more inputs, [..., K]."""
        x = inputs.reshape(-1, len(self._sum)).float()
        for start in range(0, len(self._sum), 1024):  # the upper triangle, in stripes
            self._sum[start : start + 1024, start:].addmm_(x[:, start : start + 1024].t(), x[:, start:])
        self._tokens += len(x)

    def matrix(self) -> torch.Tensor:
        """[K, K] float32; zeros without inputs."""
        upper = self._sum.triu() / max(self._tokens, 1)
        return upper + upper.triu(1).t()


def calibrate(
    weights: Mapping[str, torch.Tensor], rounded: Mapping[str, PackedWeight], moments: torch.Tensor
) -> dict[str, PackedWeight]:
    """Choose the codes of linears with the same inputs anew; their scales stay.

    Args:
        weights: name -> [N, K] floating point, finite; N may differ.
        rounded: The same weights, packed by `NVFP4.quantize_group`.
        moments: [K, K] float32 on the weights' device, see `InputMoments`.

    Raises:
        ValueError: `moments` are not finite.
    """
    if not bool(torch.isfinite(moments).all()):
        raise ValueError(
            f"inputs of {next(iter(weights))!r} are NaN or infinite. Finite activations are needed. Check that the"
            " model answers sensibly."
        )
    scales = torch.cat([packed.block_scale.float() * packed.global_decode_scale for packed in rounded.values()])
    codes = _codes(torch.cat([weights[name].float() for name in rounded]), scales, moments)
    parts = pack_codes(codes).split([packed.shape[0] for packed in rounded.values()])
    return {
        name: replace(packed, tensors=(part.contiguous(), *packed.tensors[1:]))
        for (name, packed), part in zip(rounded.items(), parts, strict=True)
    }


def output_errors(weight: torch.Tensor, packed: Sequence[PackedWeight], moments: torch.Tensor) -> list[float]:
    """||X W'^T - X W^T|| / ||X W^T|| of each W', over the inputs that `moments` are of.

    It is 0 where the linear answers with zeros.
    """

    def squares(part: torch.Tensor) -> float:
        return max(float(((part @ moments) * part).sum(dtype=torch.float64)), 0.0)

    weight = weight.float()
    norm = squares(weight)
    errors = (squares(dequantize(one, torch.float32) - weight) for one in packed)
    return [(error / norm) ** 0.5 if norm > 0 else 0.0 for error in errors]


def _codes(weight: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """The codes [N, K] uint8 of a weight [N, K] with scales [N, K / 16]."""
    order = moments.diagonal().argsort(descending=True, stable=True)
    # A column of the weight is a row here, which lies in one piece.
    columns, scales = weight.t()[order], scales.t().contiguous()
    feedback = _feedback(moments, order)
    errors, values = torch.empty_like(columns), torch.empty_like(columns)
    blocks = (order // BLOCK_SIZE).tolist()
    for start in range(0, len(columns), _COLUMNS):
        stop = min(start + _COLUMNS, len(columns))
        targets = columns[start:stop] + feedback[:start, start:stop].t() @ errors[:start]
        inside = feedback[start:stop, start:stop].t().contiguous()
        for k in range(start, stop):  # as few launches as can be: on a GPU they are what takes the time
            scale, before = scales[blocks[k]], k - start
            target = torch.addmv(targets[before], errors[start:k].t(), inside[before, :before]).div_(scale)
            to_e2m1(target.abs(), out=values[k]).copysign_(target)
            torch.sub(columns[k], values[k] * scale, out=errors[k])
    return e2m1_codes(values[order.argsort()].t().contiguous())


def _feedback(moments: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """U of H = (U + I) D (U + I)^T, [K, K] float32 with ones on its diagonal; rows and columns in `order`."""
    backwards = order.flip(0)  # Cholesky's factor is a lower triangle, and backwards an upper one
    damped = moments[backwards[:, None], backwards].double()
    mean = float(damped.diagonal().mean())
    damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    lower = torch.linalg.cholesky(damped)
    del damped  # matrices of gigabytes
    return lower.div_(lower.diagonal().clone()).float().flip(0, 1)
