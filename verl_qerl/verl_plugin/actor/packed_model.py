"""Fill a Transformers model with packed weights straight from a checkpoint; no dense copy of the model ever exists."""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import left_out, packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.ignore import is_packed_module
from verl_qerl.modules.convert import replace_experts, replace_linears
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.nvfp4_experts import ExpertLinear
from verl_qerl.modules.packed_linear import PackedLinear
from verl_qerl.verl_plugin.config.base_options import BaseOptions


def build_skeleton(
    model: nn.Module, path: str, ignore: tuple[str, ...], kind: type[PackedLinear] = NVFP4Linear
) -> dict[str, PackedLinear | ExpertLinear]:
    """Replace the decoder linears and experts of an empty model by unfilled packed ones.

    Args:
        model: On the meta device.
        path: The checkpoint; a packed one brings its own list of modules left out.
        ignore: Modules of a bf16 checkpoint that stay dense.

    Returns:
        name -> packed linear, or the place of an expert's linear.

    Raises:
        CheckpointFormatError: The checkpoint is in another format, or this format does not hold its experts.
    """
    rules = left_out(open_source(path), kind.form, ignore)
    linears = replace_linears(model, lambda name: is_packed_module(name, rules), kind)
    experts = replace_experts(model)
    if experts and kind is not NVFP4Linear:
        raise ValueError(
            f"experts cannot be spread over ranks: qerl.base.shard=true, {len(experts)} of their linears in"
            f" {path}. Accepted is false: every rank holds the packed base. Leave it out."
        )
    return {**linears, **experts}


def load_packed(
    model: PreTrainedModel,
    linears: dict[str, PackedLinear | ExpertLinear],
    path: str,
    options: BaseOptions,
    dtype: torch.dtype,
) -> None:
    """Read the checkpoint into `model`, on the CPU; quantization runs on the GPU when there is one.

    Args:
        model: From `build_skeleton`; its parameters are replaced.
        linears: The same call's result.
        options: Format; scale choice and ignored modules for a bf16 checkpoint.
        dtype: The dtype of everything that is not packed.

    Raises:
        CheckpointFormatError: The checkpoint holds a tensor the model has no place for, or lacks one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    waiting = dict(linears)
    places = dict(model.named_parameters(remove_duplicate=False))
    for name, item in packed_stream(open_source(path), options.weight_format, options.ignore, device):
        if isinstance(item, PackedWeight):
            if name not in waiting:
                raise _mismatch(path, model, f"packs {name!r}, which is no linear of the model")
            linear: Any = waiting.pop(name)
            _check_shape(path, model, name, item.shape, (linear.out_features, linear.in_features))
            linear.fill(item.to("cpu"))
        else:
            if name not in places:
                if _is_left_out(model, name):
                    continue
                raise _mismatch(path, model, f"holds {name!r}, for which the model has no place")
            _check_shape(path, model, name, item.shape, places[name].shape)
            parent, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(item.to("cpu", dtype), requires_grad=places[name].requires_grad)
            model.get_submodule(parent).register_parameter(leaf, parameter)
    if waiting:
        raise _mismatch(
            path, model, f"holds no packed weight for {len(waiting)} linears, first {next(iter(waiting))!r}"
        )
    model.tie_weights()
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lost:
        raise _mismatch(path, model, f"lacks {len(lost)} parameters, first {lost[0]!r}")


def _is_left_out(model: nn.Module, name: str) -> bool:
    """Whether transformers and vLLM leave a tensor in its file: what is computed anew, and what the model says."""
    patterns = (r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    return any(re.search(pattern, name) for pattern in patterns)


def _check_shape(path: str, model: nn.Module, name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise _mismatch(path, model, f"holds {name!r} of {tuple(found)}, the model {tuple(wanted)}")


def _mismatch(path: str, model: nn.Module, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} {what}. Tensors and {type(model).__name__} must match one to one."
        " Check that config.json belongs to these weights."
    )
