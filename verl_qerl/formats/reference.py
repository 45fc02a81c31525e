"""Quantize and dequantize NVFP4 in plain torch: the specification every kernel is tested against.

Every step is an elementwise IEEE operation and sums over a block run in a fixed order, so that a CPU and a GPU give the
same bits: actor and rollout may quantize on different devices and still agree.
"""

from collections.abc import Sequence

import torch

from verl_qerl.formats.nvfp4_weight import BLOCK_SIZE, E2M1_MAX, E2M1_VALUES, E4M3_MAX, E4M3_MIN_NORMAL, PackedWeight

SCALE_CHOICES = ("mse", "minmax")
DEFAULT_SCALE = "mse"

# Steps of E4M3 from the one nearest to amax / 6 that a block's scale is tried at: amax lands on 3.3 to 8. Of
# normal numbers and their second to fourth powers (the tests) no block has a better one among all scales of E4M3.
_STEPS = {"minmax": (0,), "mse": tuple(range(-2, 7))}
# Largest block scale before these steps, so that the last one still fits E4M3.
_HEADROOM = {"minmax": E4M3_MAX, "mse": 256.0}
_LEAST, _LARGEST = 0x08, 0x7E  # bytes of E4M3_MIN_NORMAL and E4M3_MAX
_EXPONENT = 0x7F800000  # of a float32
_ROUNDER = 1.5 * 2**22  # a float32 of [2**22, 2**23) has a step of 1 / 2
# Bounds temporaries: to a few hundred MB on a GPU, and to what a core's caches keep on a CPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}


def quantize(weight: torch.Tensor, scale: str = DEFAULT_SCALE, name: str = "weight") -> PackedWeight:
    """Quantize one weight. See `quantize_group`."""
    return quantize_group({name: weight}, scale)[name]


def quantize_group(weights: dict[str, torch.Tensor], scale: str = DEFAULT_SCALE) -> dict[str, PackedWeight]:
    """Quantize weights that a kernel multiplies as one (q, k, v; gate, up), with one global scale for all.

    vLLM takes the maximum of the global scales of a fused linear without rescaling the blocks, so they must be equal.

    Args:
        weights: name -> [N, K] floating point, K % 16 == 0; N may differ.
        scale: Of each block: `mse` (that with the least squared error) or `minmax` (amax to 6, as QeRL).

    Returns:
        name -> PackedWeight on the weight's device. The global scale is a power of two.

    Raises:
        ValueError: Unknown `scale`, a K that is no multiple of 16, or NaN or infinite values.
    """
    if scale not in SCALE_CHOICES:
        raise ValueError(f"unknown scale choice: scale={scale!r}. Choose one of {', '.join(SCALE_CHOICES)}.")
    for name, weight in weights.items():
        check_weight(name, weight)
        check_in_features(name, weight.shape[1])
    amax = max(float(weight.abs().amax()) for weight in weights.values())
    encode = _power_of_two_below(_HEADROOM[scale] * E2M1_MAX / amax) if amax > 0 else 1.0
    return {name: _quantize(weight, encode, scale) for name, weight in weights.items()}


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode an NVFP4 weight.

    w[n, k] = e2m1(codes)[n, k] * block_scale[n, k // 16] * global_decode_scale

    Args:
        weight: [N, K], K % 16 == 0.
        dtype: Of the result. The product is taken in float32 and rounded once.

    Returns:
        [N, K] of `dtype` on the weight's device.
    """
    N, K = weight.shape
    values = e2m1_values(weight.codes).view(N, K // BLOCK_SIZE, BLOCK_SIZE)
    scales = weight.block_scale.float() * weight.global_decode_scale
    return (values * scales[..., None]).view(N, K).to(dtype)


def relative_error(weight: torch.Tensor, packed: PackedWeight) -> float:
    """||dequantize(packed) - weight|| / ||weight||, Frobenius norms; 0 for a zero weight."""
    rows = chunk_rows(weight)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    unit = 1.0 / packed.global_decode_scale  # exact; keeps squares of huge and tiny weights in range
    for i in range(0, weight.shape[0], rows):
        part = PackedWeight(packed.codes[i : i + rows], packed.block_scale[i : i + rows], packed.global_decode_scale)
        original = weight[i : i + rows].float()
        error = dequantize(part, torch.float32) - original
        squares += torch.stack([(x * unit).square().sum(dtype=torch.float64) for x in (error, original)])
    error, norm = squares.sqrt().tolist()
    return error / norm if norm > 0 else 0.0


def check_in_features(name: str, in_features: int, block_size: int = BLOCK_SIZE, kind: str = "NVFP4") -> None:
    """Require in_features that a format can hold.

    Args:
        name: Of the weight, for messages.
        in_features: K.
        block_size: Of the format.
        kind: Its name, for messages.

    Raises:
        ValueError: It is no multiple of the block size.
    """
    if in_features % block_size:
        raise ValueError(
            f"in_features={in_features} of {name!r} is not a multiple of {block_size}."
            f" {kind} cannot hold this weight. Add {name!r} to `ignore`."
        )


def check_weight(name: str, weight: torch.Tensor, kind: str = "NVFP4") -> None:
    """Require a finite matrix of floating point numbers that are not codes of a quantized weight: of 16 bits or more.

    Args:
        name: For messages.
        weight: To be quantized.
        kind: Name of the format, for messages.

    Raises:
        ValueError: It is not one.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(
            f"{name!r} is {weight.dtype} with shape {tuple(weight.shape)}. {kind} holds float matrices, of 16 bits or"
            " more a number. Name the original bf16 model."
        )
    bad = weight.numel() - int(torch.isfinite(weight).sum())
    if bad:
        raise ValueError(
            f"{name!r} holds {bad} NaN or infinite values. {kind} holds finite weights only."
            " Repair the checkpoint and quantize again."
        )


def _power_of_two_below(value: float) -> float:
    # frexp is exact where log2 may round up to the next integer.
    mantissa_exponent = torch.frexp(torch.tensor(value, dtype=torch.float64)).exponent
    return float(2.0 ** min(int(mantissa_exponent) - 1, 126))


def _quantize(weight: torch.Tensor, encode: float, scale: str) -> PackedWeight:
    parts = [_quantize_rows(part, encode, _STEPS[scale]) for part in weight.split(chunk_rows(weight))]
    codes, block_scale = (torch.cat([part[i] for part in parts]) for i in range(2))
    decode = torch.tensor(1.0 / encode, dtype=torch.float32, device=weight.device)
    return PackedWeight(codes, block_scale, decode)


def chunk_rows(weight: torch.Tensor) -> int:
    """How many rows of `weight` [N, K] to work on at a time."""
    return max(1, _CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])


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
    best = least = None
    for step in steps:
        code = (middle + step).clamp_(_LEAST, _LARGEST).to(torch.uint8)
        scale = code.view(nearest.dtype).float()
        torch.mul(values, one / scale, out=scaled)
        _to_e2m1(scaled, out=error).sub_(scaled).square_()
        half = BLOCK_SIZE // 2
        while half:  # in the same order on every device
            error[:half] += error[half : 2 * half]
            half //= 2
        total = error[0] * scale.square()
        if best is None or least is None:
            best, least = code, total
            continue
        better = total < least
        best = torch.where(better, code, best)
        least = torch.where(better, total, least)
    assert best is not None
    return best.view(nearest.dtype)


def _to_e2m1(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The nearest of E2M1's values to those of `x` >= 0, ties to even; beyond 6 it is 6."""
    # Adding and subtracting a number whose step is that of E2M1 around x, 0.5 below 2 and 1 and 2 above, rounds.
    rounder = x.clamp(1.0, 4.0)
    rounder.view(torch.int32).bitwise_and_(_EXPONENT)  # 1, 2 or 4
    rounder *= _ROUNDER
    return torch.add(x, rounder, out=out).sub_(rounder).clamp_(max=E2M1_MAX)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 codes (uint8, one a value, bit 3 = sign), ties to even; magnitudes above 6 become 6."""
    # As in `_to_e2m1`; the last bits of the sum count steps of 0.5, 1 or 2, where codes count from 0, 2 or 4 on.
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    rounder = magnitude.clamp(min=1.0)
    exponent = rounder.view(torch.int32).bitwise_and_(_EXPONENT) >> 22  # twice that of float32: 254, 256 or 258
    magnitude += rounder.mul_(_ROUNDER)
    codes = magnitude.view(torch.int32).bitwise_and_(7).add_(exponent).sub_(254)
    return codes.bitwise_or_((x.view(torch.int32) >> 28).bitwise_and_(8)).to(torch.uint8)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes as [N, K / 2] bytes, even k in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 values of [N, K / 2] bytes; the inverse of `pack_codes` of `e2m1_codes`."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]
