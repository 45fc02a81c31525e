"""Quantize and dequantize NVFP4 in plain torch: the specification every kernel is tested against.

Every step is an elementwise IEEE operation and sums over a block run in a fixed order, so that a CPU and a GPU give the
same bits: actor and rollout may quantize on different devices and still agree.
"""

from collections.abc import Sequence

import torch

from verl_qerl.nvfp4.format import BLOCK_SIZE, E2M1_MAX, E2M1_VALUES, E4M3_MAX, E4M3_MIN_NORMAL, PackedWeight

SCALE_CHOICES = ("minmax", "mse", "four_over_six")

# Factors on amax / 6 that a block's scale is tried with.
_FACTORS = {
    "minmax": (1.0,),
    "four_over_six": (1.0, 1.5),  # amax lands on 6 or on 4 (arXiv 2512.02010)
    "mse": tuple(i / 64 for i in range(40, 108, 4)),  # 0.625 .. 1.625; as good as trying every E4M3 neighbour
}
# Largest block scale before the factor, so that the largest factor still fits E4M3.
_HEADROOM = {"minmax": E4M3_MAX, "four_over_six": 256.0, "mse": 256.0}
# Bounds temporaries: to a few hundred MB on a GPU, and to what a core's caches and the allocator keep on a CPU, where a
# large chunk is three times slower (measured: 61 against 20 M weights a second, most of it page faults).
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}


def quantize(weight: torch.Tensor, scale: str = "minmax", name: str = "weight") -> PackedWeight:
    """Quantize one weight. See `quantize_group`."""
    return quantize_group({name: weight}, scale)[name]


def quantize_group(weights: dict[str, torch.Tensor], scale: str = "minmax") -> dict[str, PackedWeight]:
    """Quantize weights that a kernel multiplies as one (q, k, v; gate, up), with one global scale for all.

    vLLM takes the maximum of the global scales of a fused linear without rescaling the blocks, so they must be equal.

    Args:
        weights: name -> [N, K] floating point, K % 16 == 0; N may differ.
        scale: `minmax` (amax to 6, as QeRL), `mse` (the factor with the least squared error), `four_over_six`.

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
    parts = [_quantize_rows(part, encode, _FACTORS[scale]) for part in weight.split(chunk_rows(weight))]
    codes, block_scale = (torch.cat([part[i] for part in parts]) for i in range(2))
    decode = torch.tensor(1.0 / encode, dtype=torch.float32, device=weight.device)
    return PackedWeight(codes, block_scale, decode)


def chunk_rows(weight: torch.Tensor) -> int:
    """How many rows of `weight` [N, K] to work on at a time."""
    return max(1, _CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])


def _quantize_rows(weight: torch.Tensor, encode: float, factors: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    n, K = weight.shape
    blocks = weight.float().reshape(n, K // BLOCK_SIZE, BLOCK_SIZE) * encode  # exact: a power of two
    # By a tensor on the device: CUDA turns a division by a number into a product with its reciprocal.
    ideal = blocks.abs().amax(dim=-1) / blocks.new_tensor(E2M1_MAX)
    best_codes, best_scale, scaled = _encode(blocks, ideal * factors[0])
    if len(factors) > 1:
        best_error = _block_error(scaled, best_codes, best_scale)
    for factor in factors[1:]:
        codes, scale, scaled = _encode(blocks, ideal * factor)
        error = _block_error(scaled, codes, scale)
        better = error < best_error
        best_codes = torch.where(better[..., None], codes, best_codes)
        best_scale = torch.where(better, scale.view(torch.uint8), best_scale.view(torch.uint8)).view(scale.dtype)
        best_error = torch.where(better, error, best_error)
    return pack_codes(best_codes.view(n, K)), best_scale


def _encode(blocks: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, E4M3 block scale, blocks over that scale)."""
    scale = scale.clamp(E4M3_MIN_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks / scale.float()[..., None]
    return e2m1_codes(scaled), scale, scaled


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 codes (uint8, one a value, bit 3 = sign), ties to even; magnitudes above 6 become 6."""
    # On each of the grid's three spacings (0.5, 1, 2); torch.round ties to even.
    a = x.abs().clamp(max=E2M1_MAX)
    index = torch.where(a < 2, (a * 2).round(), torch.where(a < 4, a.round() + 2, (a / 2).round() + 4))
    return index.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes as [N, K / 2] bytes, even k in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 values of [N, K / 2] bytes; the inverse of `pack_codes` of `e2m1_codes`."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


def _block_error(scaled: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(E2M1_VALUES, device=scaled.device)
    squared = (table[codes.int()] - scaled).square()
    total = squared[..., 0]
    for i in range(1, BLOCK_SIZE):  # fixed order: the same sum on every device
        total = total + squared[..., i]
    return total * scale.float().square()
