"""NVFP4 on disk: compressed-tensors `nvfp4-pack-quantized` and ModelOpt NVFP4, both read and written.

compressed-tensors   weight_packed   weight_scale   weight_global_scale [1] = 1 / global_decode_scale
ModelOpt             weight          weight_scale   weight_scale_2     [] = global_decode_scale
"""

from collections.abc import Sequence

BLOCK_SIZE = 16
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
# Of W4A4 files, and ModelOpt's of a KV cache in FP8, beside k and v; our rollouts keep activations and cache in bf16.
_ACTIVATION_SCALES = ("input_scale", "input_global_scale", "k_proj.k_scale", "v_proj.v_scale")


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
    """The content of hf_quant_config.json, which readers of ModelOpt's older files look for."""
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


def is_activation_scale(name: str) -> bool:
    """Whether the tensor scales activations or a KV cache, which weight-only rollouts do not quantize."""
    return name.endswith(tuple(f".{scale}" for scale in _ACTIVATION_SCALES))
