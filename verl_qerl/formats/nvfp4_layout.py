"""NVFP4 on disk: compressed-tensors `nvfp4-pack-quantized` and ModelOpt NVFP4, both read and written.

compressed-tensors   weight_packed   weight_scale   weight_global_scale [1] = 1 / global_decode_scale
ModelOpt             weight          weight_scale   weight_scale_2     [] = global_decode_scale
"""

import logging
import math
from collections.abc import Sequence

import torch

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats.ignore import DEFAULT_IGNORE
from verl_qerl.formats.nvfp4_weight import BLOCK_SIZE, E4M3_MAX, E4M3_MIN_NORMAL, PackedWeight
from verl_qerl.formats.tensor_spec import TensorSpec

logger = logging.getLogger(__name__)

FORMAT = "nvfp4-pack-quantized"
CODES, BLOCK_SCALE, GLOBAL_SCALE = "weight_packed", "weight_scale", "weight_global_scale"
# Members of one kernel launch in vLLM; they share one global scale.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# (codes, block scales, global scale) of a packed weight, by layout.
PART_NAMES = {
    "compressed-tensors": (CODES, BLOCK_SCALE, GLOBAL_SCALE),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
# ModelOpt's name for 4-bit weights under bf16 activations; `NVFP4` alone would have vLLM quantize activations too.
MODELOPT_ALGORITHM = "W4A16_NVFP4"
# Names that only a packed weight has (ModelOpt keeps the codes under the name of the bf16 weight).
PARTS = {
    "compressed-tensors": (f".{CODES}", f".{BLOCK_SCALE}", f".{GLOBAL_SCALE}"),
    "modelopt": (".weight_scale", ".weight_scale_2"),
}
# compressed-tensors' name of a neighbour's layout -> name of the weight format; `formats` has what is behind them.
SIBLINGS = {"int-quantized": "int8", "float-quantized": "fp8", "mxfp4-pack-quantized": "mxfp4"}
# Of W4A4 files, and ModelOpt's of a KV cache in FP8, beside k and v; our rollouts keep activations and cache in bf16.
_ACTIVATION_SCALES = ("input_scale", "input_global_scale", "k_proj.k_scale", "v_proj.v_scale")


def quantization_config(ignore: Sequence[str] = DEFAULT_IGNORE) -> dict:
    """The `quantization_config` of config.json that vLLM 0.24.0 and transformers 5.9 both read.

    Args:
        ignore: Modules left in bf16: exact names, or `re:` and a regular expression.
    """
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": "torch.float8_e4m3fn",
    }
    return compressed_tensors_config(FORMAT, weights, None, ignore)


def compressed_tensors_config(
    layout: str, weights: dict, input_activations: dict | None, ignore: Sequence[str]
) -> dict:
    """A `quantization_config` with one group of all linears that `ignore` does not name.

    Args:
        layout: compressed-tensors' name of the format, e.g. `int-quantized`.
        weights: compressed-tensors' QuantizationArgs.
        input_activations: The same, or None where activations stay as they are.
        ignore: As `quantization_config`'s.
    """
    group = {
        "targets": ["Linear"],
        "format": layout,
        "weights": weights,
        "input_activations": input_activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


def modelopt_config(ignore: Sequence[str]) -> dict:
    """The `quantization_config` of config.json that vLLM's `modelopt` loader reads.

    Args:
        ignore: Names of the modules left in bf16, in full: ModelOpt knows wildcards, not regular expressions.
    """
    return {
        "quant_method": "modelopt",
        "quant_algo": MODELOPT_ALGORITHM,
        "group_size": BLOCK_SIZE,
        "kv_cache_scheme": None,
        "ignore": list(ignore),
    }


def modelopt_legacy_config(ignore: Sequence[str]) -> dict:
    """The same as hf_quant_config.json, which readers of ModelOpt's older files look for."""
    return {
        "producer": {"name": "modelopt"},  # readers take it for the name of the format
        "quantization": {
            "quant_algo": MODELOPT_ALGORITHM,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": list(ignore),
        },
    }


def fused_group(module: str) -> tuple[str, tuple[str, ...]]:
    """(key, modules) of the group that shares one global scale with `module`; a group of one for most linears."""
    parent, _, leaf = module.rpartition(".")
    for members in FUSED_GROUPS:
        if leaf in members:
            return f"{parent}.{'+'.join(members)}", tuple(f"{parent}.{member}" for member in members)
    return module, (module,)


def nvfp4_specs(N: int, K: int, layout: str = "compressed-tensors") -> dict[str, TensorSpec]:
    """The tensors that an NVFP4 weight [N, K] becomes in `layout`, without the name of their module."""
    codes, block_scale, global_scale = PART_NAMES[layout]
    return {
        codes: TensorSpec("U8", (N, K // 2)),
        block_scale: TensorSpec("F8_E4M3", (N, K // BLOCK_SIZE)),
        global_scale: TensorSpec("F32", () if layout == "modelopt" else (1,)),
    }


def to_tensors(module: str, weight: PackedWeight, layout: str = "compressed-tensors") -> dict[str, torch.Tensor]:
    """Names and tensors of one weight in `layout`, as the table above has them."""
    decode = weight.global_decode_scale
    global_scale = decode.reshape(()) if layout == "modelopt" else (1.0 / decode).reshape(1)
    parts = zip(PART_NAMES[layout], (weight.codes, weight.block_scale, global_scale), strict=True)
    return {f"{module}.{kind}": tensor for kind, tensor in parts}


def from_tensors(module: str, tensors: dict[str, torch.Tensor], layout: str) -> PackedWeight:
    """The inverse of `to_tensors`, and of ModelOpt's names.

    Block scales below 2**-6 are read as Marlin computes with them: their blocks become zero.

    Args:
        module: For messages.
        tensors: Keyed by the names of `layout` without the module.
        layout: `compressed-tensors` or `modelopt`.

    Raises:
        CheckpointFormatError: A tensor is missing or unknown, or dtypes and shapes do not fit.
    """
    if layout == "modelopt":
        ours = dict(zip(PART_NAMES["modelopt"], PART_NAMES["compressed-tensors"], strict=True))
        tensors = {ours.get(key, key): tensor for key, tensor in tensors.items()}
    missing = {CODES, BLOCK_SCALE, GLOBAL_SCALE} - set(tensors)
    if missing:
        raise CheckpointFormatError(f"{module!r} lacks {sorted(missing)}. Download or quantize the model again.")
    unknown = sorted(set(tensors) - {CODES, BLOCK_SCALE, GLOBAL_SCALE})
    if unknown:
        raise CheckpointFormatError(
            f"{module!r} has {unknown} beside what an NVFP4 weight is made of, and they may change it. Accepted are"
            f" {', '.join(PART_NAMES[layout])}. Quantize the original model with `python -m verl_qerl quantize`."
        )
    scale = tensors[GLOBAL_SCALE].float()
    if scale.numel() != 1 or not (torch.isfinite(scale) and scale > 0):
        raise CheckpointFormatError(
            f"the global scale of {module!r} is {scale.flatten()[:4].tolist()}. One positive number is accepted."
            " The file is damaged: download or quantize the model again."
        )
    scale = scale.reshape(())
    try:
        weight = PackedWeight(tensors[CODES], tensors[BLOCK_SCALE], scale if layout == "modelopt" else 1.0 / scale)
    except ValueError as error:
        raise CheckpointFormatError(f"{module!r}: {error}") from error
    if not bool((weight.block_scale.float() >= 0).all()):
        raise CheckpointFormatError(
            f"{module!r} has block scales that are negative or NaN. Numbers from 0 to 448 are accepted."
            " The file is damaged: download or quantize the model again."
        )
    return _without_subnormal_scales(module, weight)


def is_activation_scale(name: str) -> bool:
    """Whether the tensor scales activations or a KV cache, which weight-only rollouts do not quantize."""
    return name.endswith(tuple(f".{scale}" for scale in _ACTIVATION_SCALES))


def share_scale(weights: dict[str, PackedWeight]) -> dict[str, PackedWeight]:
    """Weights of a fused group with one global scale, and the values that they had.

    Where global scales differ by powers of two, these go into the block scales, which is exact as long as they stay in
    the range of E4M3's normal numbers. The scale of a block of zeros may be any.

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
        f"linears that vLLM fuses have different global scales: {scales}. Accepted is one scale for a group, or scales"
        " that differ by powers of two which the block scales can take. Quantize the bf16 model with `python -m"
        " verl_qerl quantize`, or this one with --requantize too."
    )


def _scales_of_blocks(weight: PackedWeight) -> tuple[float, float]:
    """The least and the largest product of block scale and global scale, of blocks that are not zero."""
    scale = weight.block_scale.float()[_holds_numbers(weight)]
    if not scale.numel():
        return math.inf, 0.0
    decode = float(weight.global_decode_scale)
    return float(scale.min()) * decode, float(scale.max()) * decode


def _with_scale(weight: PackedWeight, shared: float) -> PackedWeight:
    factor = float(weight.global_decode_scale) / shared
    block_scale = (weight.block_scale.float() * factor).clamp(E4M3_MIN_NORMAL, E4M3_MAX)
    decode = torch.full_like(weight.global_decode_scale, shared)
    return PackedWeight(weight.codes, block_scale.to(torch.float8_e4m3fn), decode)


def _holds_numbers(weight: PackedWeight) -> torch.Tensor:
    """[N, K / 16] bool: whether a block has a code other than 0.0 and -0.0."""
    codes = weight.codes.view(*weight.block_scale.shape, BLOCK_SIZE // 2)
    return ((codes & 0x77) != 0).any(dim=-1)


def _without_subnormal_scales(module: str, weight: PackedWeight) -> PackedWeight:
    small = weight.block_scale.float() < E4M3_MIN_NORMAL
    count = int(small.sum())
    if not count:
        return weight
    logger.warning("%s: %d block scales below 2**-6 are zero in Marlin; their blocks are read as zero.", module, count)
    codes = weight.codes.masked_fill(small.repeat_interleave(BLOCK_SIZE // 2, dim=1), 0)
    scale = weight.block_scale.float().clamp(min=E4M3_MIN_NORMAL).to(torch.float8_e4m3fn)
    return PackedWeight(codes, scale, weight.global_decode_scale)
