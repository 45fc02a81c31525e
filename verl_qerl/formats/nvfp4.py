"""NVFP4: two E2M1 codes a byte, an E4M3 scale for each block of 16, one global scale for each group of fused linears.

    w[n, k] = e2m1(codes)[n, k] * block_scale[n, k // 16] * global_decode_scale

E2M1 carries two significand bits and E4M3 four, so the product of code and block scale needs at most six; bf16 has
eight. With a global scale that is a power of two the bf16 value is therefore exact, and equals what Marlin and humming
multiply by. vLLM takes the maximum of the global scales of a fused linear without rescaling the blocks, so they must be
equal.

Every step is an elementwise IEEE operation and sums over a block run in a fixed order, so that a CPU and a GPU give the
same bits: actor and rollout may quantize on different devices and still agree.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import nvfp4_layout
from verl_qerl.formats.base import PackedWeight, WeightFormat, e2m1_config, in_chunks
from verl_qerl.formats.channel import E4M3_MAX
from verl_qerl.formats.e2m1 import E2M1_MAX, e2m1_codes, e2m1_values, pack_codes, to_e2m1
from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.nvfp4_layout import BLOCK_SIZE
from verl_qerl.formats.tensor_spec import TensorSpec

logger = logging.getLogger(__name__)

E4M3_MIN_NORMAL = torch.finfo(torch.float8_e4m3fn).smallest_normal  # 2**-6; Marlin reads smaller block scales as zero
SCALE_CHOICES = ("mse", "minmax")  # the first is the default

# Steps of E4M3 from the one nearest to amax / 6 that a block's scale is tried at: amax lands on 3.3 to 8. Of
# normal numbers and their second to fourth powers (the tests) no block has a better one among all scales of E4M3.
_STEPS = {"minmax": (0,), "mse": tuple(range(-2, 7))}
# Largest block scale before these steps, so that the last one still fits E4M3.
_HEADROOM = {"minmax": E4M3_MAX, "mse": 256.0}
_LEAST, _LARGEST = 0x08, 0x7E  # bytes of E4M3_MIN_NORMAL and E4M3_MAX


@dataclass(frozen=True)
class NVFP4(WeightFormat):
    """A weight [N, K], K % 16 == 0, as three tensors.

    codes: [N, K / 2] uint8, even k in the low nibble.
    block_scale: [N, K / 16] float8_e4m3fn, row-major, in [2**-6, 448].
    global_decode_scale: [] float32, multiplied to decode (amax / 2688 in ModelOpt's `weight_scale_2`; the inverse of
        compressed-tensors' `weight_global_scale`).

    `scale` chooses the block scale with the least squared error (`mse`), or the one that puts amax on 6 (`minmax`, as
    QeRL).
    """

    name: str = "nvfp4"
    kind: str = "NVFP4"
    parts: tuple[str, ...] = nvfp4_layout.PART_NAMES["compressed-tensors"]
    block_size: int = BLOCK_SIZE
    codes_per_byte: int = 2
    shares_scale: bool = True
    holds_experts: bool = True
    scale: str = SCALE_CHOICES[0]
    scale_choices: ClassVar[tuple[str, ...]] = SCALE_CHOICES

    @property
    def layouts(self) -> Mapping[str, tuple[str, ...]]:
        """See `WeightFormat.layouts`."""
        return nvfp4_layout.PART_NAMES

    def _quantize_group(self, weights: Mapping[str, torch.Tensor]) -> dict[str, PackedWeight]:
        amax = max(float(weight.abs().amax()) for weight in weights.values())
        encode = _power_of_two_below(_HEADROOM[self.scale] * E2M1_MAX / amax) if amax > 0 else 1.0
        quantize_rows = partial(_quantize_rows, encode=encode, steps=_STEPS[self.scale])
        packed = {}
        for name, weight in weights.items():
            decode = torch.tensor(1.0 / encode, dtype=torch.float32, device=weight.device)
            packed[name] = PackedWeight(self, (*in_chunks(weight, quantize_rows), decode))
        return packed

    def dequantize(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """See `WeightFormat.dequantize`."""
        codes, block_scale, global_decode_scale = tensors
        N, num_blocks = block_scale.shape
        values = e2m1_values(codes).view(N, num_blocks, BLOCK_SIZE)
        scales = block_scale.float() * global_decode_scale
        return (values * scales[..., None]).view(N, num_blocks * BLOCK_SIZE).to(dtype)

    def held(self, N: int, K: int) -> tuple[TensorSpec, ...]:
        """See `WeightFormat.held`."""
        return TensorSpec("U8", (N, K // 2)), TensorSpec("F8_E4M3", (N, K // BLOCK_SIZE)), TensorSpec("F32", ())

    def specs(self, N: int, K: int, layout: str = "compressed-tensors") -> dict[str, TensorSpec]:
        """See `WeightFormat.specs`."""
        found = super().specs(N, K, layout)
        return found if layout == "modelopt" else found | {nvfp4_layout.GLOBAL_SCALE: TensorSpec("F32", (1,))}

    def to_tensors(self, weight: PackedWeight, layout: str = "compressed-tensors") -> dict[str, torch.Tensor]:
        """See `WeightFormat.to_tensors`."""
        found = super().to_tensors(weight, layout)
        if layout == "modelopt":
            return found
        return found | {nvfp4_layout.GLOBAL_SCALE: (1.0 / weight.global_decode_scale).reshape(1)}

    def _read(self, where: str, tensors: tuple[torch.Tensor, ...], layout: str) -> PackedWeight:
        # Block scales below 2**-6 are read as Marlin computes with them: their blocks become zero.
        codes, block_scale, scale = tensors[0], tensors[1], tensors[2].float()
        if scale.numel() != 1 or not (torch.isfinite(scale) and scale > 0):
            raise ValueError(f"its global scale is {scale.flatten()[:4].tolist()}, not one positive number.")
        weight = nvfp4_weight(codes, block_scale, scale if layout == "modelopt" else 1.0 / scale)
        if not bool((block_scale.float() >= 0).all()):
            raise ValueError("its block scales are not all numbers from 0 to 448.")
        return _without_subnormal_scales(where, weight)

    def with_shared_scale(self, weights: dict[str, PackedWeight]) -> dict[str, PackedWeight]:
        """Weights of a fused group with one global scale, and the values that they had.

        Where global scales differ by powers of two, these go into the block scales, which is exact as long as they stay
        in the range of E4M3's normal numbers. The scale of a block of zeros may be any.

        Raises:
            CheckpointFormatError: The scales differ otherwise; vLLM would use the largest divisor for all of them.
        """
        scales = {name: float(weight.global_decode_scale) for name, weight in weights.items()}
        if len(set(scales.values())) == 1:
            return weights
        if len({math.frexp(scale)[0] for scale in scales.values()}) == 1:
            blocks = [_scales_of_blocks(weight) for weight in weights.values()]
            least, largest = min(low for low, _ in blocks), max(high for _, high in blocks)
            shared = min(scales.values())
            while shared * E4M3_MAX < largest:
                shared *= 2
            while shared / 2 * E4M3_MAX >= largest > 0:
                shared /= 2
            if least >= shared * E4M3_MIN_NORMAL:
                return {name: _with_scale(weight, shared) for name, weight in weights.items()}
        raise CheckpointFormatError(
            f"linears that vLLM fuses have different global scales: {scales}. Accepted is one scale for a group, or"
            " scales that differ by powers of two which the block scales can take. Quantize the bf16 model with `python"
            " -m verl_qerl quantize`, or this one with --requantize too."
        )

    def is_exact(self, weight: PackedWeight) -> bool:
        """Whether the global scale is a power of two."""
        return math.frexp(float(weight.global_decode_scale))[0] == 0.5

    def digest_label(self, shape: tuple[int, int]) -> str:
        """The shape alone: digests of NVFP4 are older than the other formats."""
        return repr(shape)

    def config(self, ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
        """See `WeightFormat.config`; vLLM 0.24.0 and transformers 5.9 both read it."""
        return e2m1_config("nvfp4-pack-quantized", "tensor_group", BLOCK_SIZE, "torch.float8_e4m3fn", ignore)


_FORMAT = NVFP4()


def nvfp4_weight(codes: torch.Tensor, block_scale: torch.Tensor, global_decode_scale: torch.Tensor) -> PackedWeight:
    """A weight from its tensors as `NVFP4` describes them; the global scale may have any shape of one element.

    Raises:
        ValueError: They do not fit together.
    """
    one = global_decode_scale.reshape(()) if global_decode_scale.numel() == 1 else global_decode_scale
    return PackedWeight(_FORMAT, (codes, block_scale, one))


def _power_of_two_below(value: float) -> float:
    return 2.0 ** min(math.frexp(value)[1] - 1, 126)  # exact, where log2 may round up to the next integer


def _quantize_rows(weight: torch.Tensor, encode: float, steps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    n, K = weight.shape
    blocks = weight.float().reshape(-1, BLOCK_SIZE) * encode  # exact: a power of two
    # By a tensor on the device: CUDA turns a division by a number into a product with its reciprocal.
    ideal = blocks.abs().amax(dim=-1) / blocks.new_tensor(E2M1_MAX)
    scale = ideal.clamp(E4M3_MIN_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
    if len(steps) > 1:
        scale = _best_scale(blocks, scale, steps)
    codes = e2m1_codes(blocks / scale.float()[:, None])
    return pack_codes(codes.view(n, K)), scale.view(n, K // BLOCK_SIZE)


def _best_scale(blocks: torch.Tensor, nearest: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    """The scale of each block that has the least squared error, the first one of equals.

    Args:
        blocks: [blocks, 16] float32.
        nearest: [blocks] E4M3.
        steps: Tried are the scales so many steps of E4M3 from `nearest`.

    Returns:
        [blocks] E4M3.
    """
    values = blocks.abs().t().contiguous()  # [16, blocks]: a scale a column, and sums of whole rows
    scaled, error = torch.empty_like(values), torch.empty_like(values)
    one, middle = values.new_ones(()), nearest.view(torch.uint8).short()
    best, least = nearest.view(torch.uint8), torch.full_like(values[0], torch.inf)
    for step in steps:
        code = (middle + step).clamp_(_LEAST, _LARGEST).to(torch.uint8)
        scale = code.view(nearest.dtype).float()
        torch.mul(values, one / scale, out=scaled)
        to_e2m1(scaled, out=error).sub_(scaled).square_()
        half = BLOCK_SIZE // 2
        while half:  # in the same order on every device
            error[:half] += error[half : 2 * half]
            half //= 2
        total = error[0] * scale.square()
        better = total < least
        best = torch.where(better, code, best)
        least = torch.where(better, total, least)
    return best.view(nearest.dtype)


def _scales_of_blocks(weight: PackedWeight) -> tuple[float, float]:
    """The least and the largest product of block scale and global scale, of blocks that are not zero."""
    codes = weight.codes.view(*weight.block_scale.shape, BLOCK_SIZE // 2)
    holds_numbers = ((codes & 0x77) != 0).any(dim=-1)  # other than 0.0 and -0.0
    scale = weight.block_scale.float()[holds_numbers]
    if not scale.numel():
        return math.inf, 0.0
    decode = float(weight.global_decode_scale)
    return float(scale.min()) * decode, float(scale.max()) * decode


def _with_scale(weight: PackedWeight, shared: float) -> PackedWeight:
    factor = float(weight.global_decode_scale) / shared
    block_scale = (weight.block_scale.float() * factor).clamp(E4M3_MIN_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
    return replace(weight, tensors=(weight.codes, block_scale, torch.full_like(weight.global_decode_scale, shared)))


def _without_subnormal_scales(where: str, weight: PackedWeight) -> PackedWeight:
    small = weight.block_scale.float() < E4M3_MIN_NORMAL
    count = int(small.sum())
    if not count:
        return weight
    logger.warning("%s: %d block scales below 2**-6 are zero in Marlin; their blocks are read as zero.", where, count)
    codes = weight.codes.masked_fill(small.repeat_interleave(BLOCK_SIZE // 2, dim=1), 0)
    scale = weight.block_scale.float().clamp(min=E4M3_MIN_NORMAL).to(torch.float8_e4m3fn)
    return replace(weight, tensors=(codes, scale, weight.global_decode_scale))
