"""Fill a Transformers model with packed weights straight from a checkpoint; no dense copy of the model ever exists."""

import torch
import torch.nn as nn

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.modules.convert import replace_linears
from verl_qerl.modules.nvfp4_linear import NVFP4Linear
from verl_qerl.nvfp4.checkpoint import ignored_modules, is_ignored
from verl_qerl.nvfp4.format import PackedWeight
from verl_qerl.nvfp4.stream import open_source, stream
from verl_qerl.verl_plugin.config import BaseOptions


def build_skeleton(model: nn.Module, path: str, ignore: tuple[str, ...]) -> dict[str, NVFP4Linear]:
    """Replace the decoder linears of an empty model by unfilled packed ones.

    Args:
        model: On the meta device.
        path: Of the checkpoint; an NVFP4 one brings its own list of modules left out.
        ignore: Modules of a bf16 checkpoint that stay dense.

    Returns:
        name -> NVFP4Linear.
    """
    source = open_source(path)
    rules = ignore if source.layout == "bf16" else ignored_modules(source.config)
    return replace_linears(model, lambda name: ".layers." in f".{name}" and not is_ignored(name, rules))


def load_packed(
    model: nn.Module, linears: dict[str, NVFP4Linear], path: str, options: BaseOptions, dtype: torch.dtype
) -> None:
    """Read the checkpoint into `model`, on the CPU; quantization runs on the GPU when there is one.

    Args:
        model: From `build_skeleton`; its parameters are replaced.
        linears: The same call's result.
        path: Of the checkpoint.
        options: Scale choice and ignored modules for a bf16 checkpoint.
        dtype: Of everything that is not packed.

    Raises:
        CheckpointFormatError: The checkpoint holds a tensor the model has no place for, or lacks one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    waiting = dict(linears)
    for name, item in stream(open_source(path), options.scale, options.ignore, device):
        if isinstance(item, PackedWeight):
            if name not in waiting:
                raise _mismatch(path, model, f"packs {name!r}, which is no linear of the model")
            waiting.pop(name).fill(item.to("cpu"))
        else:
            _set_parameter(model, name, item.to("cpu", dtype), path)
    if waiting:
        raise _mismatch(
            path, model, f"holds no packed weight for {len(waiting)} linears, first {next(iter(waiting))!r}"
        )
    model.tie_weights()
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lost:
        raise _mismatch(path, model, f"lacks {len(lost)} parameters, first {lost[0]!r}")


def _set_parameter(model: nn.Module, name: str, tensor: torch.Tensor, path: str) -> None:
    parent, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(parent)
        current = getattr(module, leaf)
    except AttributeError as error:
        raise _mismatch(path, model, f"holds {name!r}, for which the model has no place") from error
    if current.shape != tensor.shape:
        raise _mismatch(path, model, f"holds {name!r} of {tuple(tensor.shape)}, the model {tuple(current.shape)}")
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=current.requires_grad))


def _mismatch(path: str, model: nn.Module, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} {what}. Tensors and {type(model).__name__} must match one to one."
        " Check that config.json belongs to these weights."
    )
