"""How config.json says that a checkpoint is quantized: each entry is honoured, logged as unused, or refused.

An entry that is passed over may change the model (a rotation of the activations, another block size) on both sides of
a run alike, so that no comparison between them sees it. Which linears are packed is not asked here: the files tell.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, WeightFormat

logger = logging.getLogger(__name__)

# ModelOpt's names of what is read as NVFP4. Others scale activations (NVFP4_AWQ) or add matrices (NVFP4_SVDQUANT).
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
# FP8 with a scale for each block of a weight, as DeepSeek has it and transformers calls it; `quantize` alone reads it.
BLOCK_FP8 = "finegrained-fp8"
_NAMES = {form.config()["format"]: name for name, form in FORMATS.items()}  # by compressed-tensors' names
# Entries that are read here or elsewhere, or that say nothing about the weights. All others must be empty.
_SHARED = {"quant_method", "config_groups", "ignore", "kv_cache_scheme"}
_KNOWN = {
    "compressed-tensors": _SHARED
    | {"format", "quantization_status", "global_compression_ratio", "version", "run_compressed"},
    "modelopt": _SHARED | {"quant_algo", "group_size", "exclude_modules", "producer", "kv_cache_quant_algo"},
    "fp8": {"quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert"},
}
_KINDS = ("weights", "input_activations")
_OF_A_GROUP = {"targets", *_KINDS, "format"}
# What of the arguments decides how codes and scales are read, with compressed-tensors' value where it is left out.
_ARGUMENTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False, "group_size": None}
_OTHER_ARGUMENTS = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure"}
_REMEDY = "Point model.path at the original bf16 model"


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of a config.json; empty for a model that is not quantized.

    Raises:
        CheckpointFormatError: It is no object.
    """
    # vLLM reads the older name too.
    found = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(found, dict):
        raise CheckpointFormatError(
            f"the model does not say how it is quantized: quantization_config={found!r}. An object is accepted."
            " Download the model again."
        )
    return found


def stored_format(config: Mapping[str, Any], where: str = "the checkpoint") -> tuple[str | None, str]:
    """What the linears of a checkpoint are stored as, from its config.json.

    Returns:
        (name of the format, or BLOCK_FP8; layout of its tensors), (None, `bf16`) of what is not quantized.

    Raises:
        CheckpointFormatError: Quantized in a way that is not read here.
    """
    found = described(config)
    if not found:
        return None, "bf16"
    method, form, algorithm = (found.get(name) for name in ("quant_method", "format", "quant_algo"))
    if method == "compressed-tensors" and isinstance(form, str) and form in _NAMES:
        return _NAMES[form], "compressed-tensors"
    if method == "modelopt" and algorithm in _ALGORITHMS:
        return "nvfp4", "modelopt"
    if method == "fp8" and found.get("weight_block_size") and found.get("fmt", "e4m3") == "e4m3":
        return BLOCK_FP8, BLOCK_FP8
    names = ("quant_method", "format", "quant_algo", "fmt", "weight_block_size")
    said = ", ".join(f"{name}={found[name]!r}" for name in names if found.get(name))
    raise CheckpointFormatError(
        f"{where} is quantized in a way that is not read: {said or 'quant_method=None'}. Accepted are"
        f" unquantized weights, compressed-tensors {', '.join(_NAMES)} and ModelOpt {', '.join(_ALGORITHMS)}."
        f" {_REMEDY}."
    )


def check_described(where: str, config: Mapping[str, Any]) -> None:
    """Require that every entry on quantization is honoured, in a config.json that `stored_format` has accepted."""
    found = described(config)
    if not found:
        return
    sparsity = found.get("sparsity_config")
    dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    _check_empty(where, "", found, _KNOWN[found["quant_method"]] | ({"sparsity_config"} if dense else set()))
    if found.get("quantization_status", "compressed") != "compressed":
        raise _refused(where, f"quantization_status={found['quantization_status']!r}", "compressed, as the files are")
    for name, group in _groups(where, found):
        _check_empty(where, f"{name}.", group, _OF_A_GROUP)
        form = group.get("format") or found.get("format")
        if form != found.get("format"):
            raise _refused(where, f"{name}.format={form!r}", f"one format for all groups, here {found.get('format')}")
        weights = group.get("weights") or {}
        known = {*_ARGUMENTS, *_OTHER_ARGUMENTS}
        if weights.get("actorder") in ("weight", "static"):  # other orders need an index beside the codes
            known.add("actorder")
        _check_empty(where, f"{name}.weights.", weights, known)
    unused = [name for name in ("kv_cache_scheme", "kv_cache_quant_algo") if found.get(name)]
    if found.get("quant_algo") == "NVFP4":
        unused.append("quant_algo=NVFP4 (of activations)")
    elif (form := FORMATS.get(stored_format(config)[0] or "")) and not form.quantizes_activations:
        unused += [
            f"{name}.input_activations" for name, group in _groups(where, found) if group.get("input_activations")
        ]
    if unused:
        _say_unused(where, ", ".join(unused))


def check_arguments(where: str, config: Mapping[str, Any], form: WeightFormat) -> None:
    """Require groups with the arguments that a format has here; where it leaves activations alone, theirs may be any.

    Raises:
        CheckpointFormatError: An argument differs, or there is no group.
    """
    found = described(config)
    groups, wanted = list(_groups(where, found)), form.config()["config_groups"]["group_0"]
    modelopt = found.get("quant_method") == "modelopt"
    if not groups and not modelopt:
        raise CheckpointFormatError(
            f"{where} does not say how it is quantized: config_groups={found.get('config_groups')}. A group of linears"
            f" is accepted. {_quantize(form.name)}"
        )
    differing = {}
    for name, group in groups:
        for kind in _KINDS:
            if kind == "weights" or wanted[kind] is not None:
                # ModelOpt leaves out what its algorithm says.
                has = {"strategy": wanted[kind]["strategy"]} | (group.get(kind) or {}) if modelopt else group.get(kind)
                differing |= _differing(f"{name}.{kind}", has, wanted[kind])
    size = wanted["weights"].get("group_size")
    if modelopt and found.get("group_size", size) != size:
        differing["group_size"] = (found["group_size"], size)
    if differing:
        said = ", ".join(f"{name}={has!r}" for name, (has, _) in differing.items())
        accepted = ", ".join(f"{name}={wants!r}" for name, (_, wants) in differing.items())
        raise CheckpointFormatError(
            f"{where} is quantized with other arguments: {said}. Accepted with {form.name} are {accepted}."
            f" {_quantize(form.name)}"
        )


def _differing(name: str, has: Any, wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Argument -> (of the checkpoint, of ours), where they differ."""
    if not has:
        return {name: (has, {key: wanted[key] for key in _ARGUMENTS if wanted.get(key) is not None})}
    pairs = {f"{name}.{key}": (has.get(key, default), wanted.get(key, default)) for key, default in _ARGUMENTS.items()}
    return {key: (one, other) for key, (one, other) in pairs.items() if one != other}


def _groups(where: str, found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    groups = found.get("config_groups") or {}
    _check_object(where, "config_groups", groups)
    for name, group in groups.items():
        _check_object(where, name, group)
        for kind in _KINDS:
            _check_object(where, f"{name}.{kind}", group.get(kind) or {})
    yield from groups.items()


def _check_object(where: str, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise CheckpointFormatError(
            f"{where} does not say how it is quantized: {name}={str(value)[:80]}. An object is accepted. {_REMEDY}, or"
            " download the model again."
        )


def _check_empty(where: str, prefix: str, found: Mapping[str, Any], known: set[str]) -> None:
    """Refuse the first entry that is not known and says something."""
    for name, value in found.items():
        if value and name not in known:
            raise _refused(where, f"{prefix}{name}={str(value)[:120]}", "an empty entry")


def _refused(where: str, what: str, accepted: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{where} asks for what is not done here, and would be another model without it: {what} in its"
        f" quantization_config. Accepted is {accepted}. {_REMEDY}."
    )


def _quantize(form: str) -> str:
    return f"Quantize the original model with `python -m verl_qerl quantize --format {form}`."


@functools.cache  # once a process: a run opens its checkpoint many times
def _say_unused(where: str, what: str) -> None:
    logger.warning(
        "%s was also made for quantized activations or a quantized KV cache (%s): both stay in bf16 here, the weights"
        " are read as they are.",
        where,
        what,
    )
