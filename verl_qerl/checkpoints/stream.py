"""`checkpoints.source.stream` for every format: a checkpoint as packed weights and other tensors, quantized on the way.

The one reader of command line, actor and rollout for a frozen base: from a bf16 checkpoint all of them quantize the
values as they are stored, with the same code, and from a packed one they take the bits as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from verl_qerl.checkpoints import source as nvfp4
from verl_qerl.checkpoints.described import check_arguments
from verl_qerl.checkpoints.experts import is_expert
from verl_qerl.checkpoints.groups import in_groups
from verl_qerl.checkpoints.source import Source, check_format, linear_modules, stored_tensors
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats.base import WeightFormat
from verl_qerl.formats.ignore import DEFAULT_IGNORE, ignored_modules, is_ignored, is_linear_weight, is_packed_module
from verl_qerl.formats.nvfp4 import NVFP4
from verl_qerl.formats.nvfp4_weight import Packed
from verl_qerl.formats.packed import QuantizedWeight

Observe = Callable[[str, torch.Tensor, Any], None]


def packed_stream(
    source: Source,
    form: WeightFormat,
    ignore: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    observe: Observe | None = None,
) -> Iterator[tuple[str, Packed | torch.Tensor]]:
    """Every tensor of the checkpoint, linears packed in `form`.

    Args:
        source: From `open_source`; not quantized, or in this format.
        form: The format, with its choice of scale.
        ignore: Modules of a source that is not quantized, left as they are (default: lm_head).
        device: Where weights are read to and quantized.
        observe: Called with module, original and packed weight of each linear that is quantized here.

    Yields:
        (module name, packed weight) for a quantized linear, (tensor name, tensor) for everything else.

    Raises:
        ValueError: A weight is incomplete or cannot be held, the source is in another format or in this one with
            other arguments, or holds experts in a format other than NVFP4.
    """
    check_held(source, form)
    if isinstance(form, NVFP4):
        yield from nvfp4.stream(source, form.scale, ignore, device, observe)
        return
    if source.format is not None:
        yield from _stored(source, form, device)
        return
    linears = linear_modules(source, ignore, form.block_size, form.kind)
    for name, item in in_groups(stored_tensors(source, device), linears, form.shares_scale):
        if isinstance(item, torch.Tensor):
            yield name, item
            continue
        for module, parts in form.quantize_group(item).items():
            packed = QuantizedWeight(form, parts)
            if observe:
                observe(module, item[module], packed)
            yield module, packed


def packed_names(source: Source, form: WeightFormat, ignore: Sequence[str] | None = None) -> set[str]:
    """The modules that `packed_stream` packs."""
    if source.format is None:
        return linear_modules(source, ignore, form.block_size, form.kind)
    return nvfp4.packed_modules(source) if isinstance(form, NVFP4) else _stored_modules(source)


def check_held(source: Source, form: WeightFormat) -> None:
    """Require a checkpoint that this format can be made of, or that is in it.

    Raises:
        CheckpointFormatError: It is in another format, in this one with other arguments or other modules, or holds
            experts, which NVFP4 alone holds.
    """
    check_format(source, form.name)
    if source.format is not None:
        check_arguments(str(source.path), source.config, form.config(), form.name)
        _check_modules(source, form)
    if isinstance(form, NVFP4):
        return
    experts = sorted(name for name in source.files if is_expert(name.rpartition(".")[0]))
    if experts:
        raise CheckpointFormatError(
            f"a mixture of experts is packed in another format: {form.name}, first {experts[0]!r} of {source.path}."
            " Accepted is nvfp4. Use it, or a model without experts."
        )


def _check_modules(source: Source, form: WeightFormat) -> None:
    """Refuse packed weights that no reader expects; see `check_held`."""
    packed = packed_names(source, form)
    if not packed:
        raise CheckpointFormatError(
            f"{source.path} holds no packed weight, and its config.json says that it is quantized to {form.name}."
            " Linears that are packed are needed. Check that config.json belongs to these weights."
        )
    outside = sorted(name for name in packed if not is_packed_module(name, ()))
    if outside:
        raise CheckpointFormatError(
            f"{source.path} packs {outside[0]!r}, and only linears inside the layers may be packed: head, embedding and"
            " routers stay in bf16. Quantize the original model, or this one with --requantize, by `python -m verl_qerl"
            f" quantize --format {form.name}`, which leaves them out."
        )
    named = ignored_modules(source.config)
    ignored = sorted(name for name in packed if is_ignored(name, named))
    if ignored:
        raise CheckpointFormatError(
            f"{source.path} packs {ignored[0]!r}, which its config.json leaves out: ignore={list(named)}. One of them"
            " is needed. Check that config.json belongs to these weights."
        )


def left_out(source: Source, form: WeightFormat, ignore: Sequence[str] | None = None) -> tuple[str, ...]:
    """The modules that are not packed, as rollout and actor are told.

    Others know more ways to leave linears out than names and `re:`: ModelOpt's wildcards, compressed-tensors' targets.
    So those of a packed checkpoint are the ones that it names, and by their full names the linears it holds unpacked.

    Args:
        source: From `open_source`; `check_held` has accepted it.
        form: The format.
        ignore: Modules of a source that is not quantized (default: lm_head).
    """
    if source.format is None:
        return tuple(ignore or DEFAULT_IGNORE)
    named, packed = ignored_modules(source.config), packed_names(source, form)
    linears = {
        name.rpartition(".")[0] for name, spec in source.specs.items() if is_linear_weight(name, spec.shape, named)
    }
    return (*named, *sorted(linears - packed))


def _stored_modules(source: Source) -> set[str]:
    # A scale makes a module a packed one, so that missing codes are noticed.
    return {name.removesuffix(".weight_scale") for name in source.files if name.endswith(".weight_scale")}


def _stored(
    source: Source, form: WeightFormat, device: str | torch.device
) -> Iterator[tuple[str, QuantizedWeight | torch.Tensor]]:
    modules = _stored_modules(source)
    wanted: dict[str, set[str]] = {}
    for name in source.files:
        module, _, part = name.rpartition(".")
        if module in modules and part != "bias":
            wanted.setdefault(module, set()).add(part)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored_tensors(source, device):
        module, _, part = name.rpartition(".")
        if part not in wanted.get(module, ()):
            yield name, tensor
            continue
        held = waiting.setdefault(module, {})
        held[part] = tensor
        if set(held) == wanted[module]:
            yield module, _weight(source, module, form, waiting.pop(module))


def _weight(source: Source, module: str, form: WeightFormat, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
    scale = tensors.get("weight_scale")
    if scale is not None and scale.is_floating_point():  # other tools write it in bf16; kernels read float32
        tensors["weight_scale"] = scale.float()
    try:
        weight = QuantizedWeight(form, tensors)
        form.check_values(tensors)
    except ValueError as error:
        raise CheckpointFormatError(
            f"{module!r} of {source.path} is no weight in {form.name}: {error} What `python -m verl_qerl quantize"
            f" --format {form.name}` writes is accepted. Download or quantize the model again."
        ) from error
    return weight
