"""A checkpoint as a stream of packed weights and other tensors: the one reader of command line, actor and rollout.

From a bf16 checkpoint all of them quantize the values as they are stored, with the same code, and from a packed one
they take the bits as they are. Memory: one tensor of a shard, plus the members of a fused group (q, k, v; gate, up)
that are still waiting for each other.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path

import torch

from verl_qerl.checkpoints.experts import check_all_packed, is_expert
from verl_qerl.checkpoints.groups import in_groups, linears_among
from verl_qerl.checkpoints.quantization_config import BLOCK_FP8, check_arguments
from verl_qerl.checkpoints.source import Source, whole_weights
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import DEFAULT_FORMAT, FORMATS, PackedWeight, WeightFormat
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.ignore import DEFAULT_IGNORE, ignored_modules, is_ignored, is_packed_module
from verl_qerl.formats.tensor_spec import DTYPES

logger = logging.getLogger(__name__)

Observe = Callable[[str, torch.Tensor, PackedWeight], None]

# The formats in which vLLM loads a family, where these are not all: it quantizes no linear of Mamba's, and reorders the
# weights of GPT-NeoX's attention as it reads them, which fails at NVFP4's global scale.
_LOADED = {"falcon_mamba": (), "gpt_neox": ("fp8", "int8", "mxfp4"), "mamba": ()}


def packed_stream(
    source: Source,
    form: WeightFormat = DEFAULT_FORMAT,
    ignore: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    observe: Observe | None = None,
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    """Every tensor of the checkpoint, linears packed in `form`.

    Args:
        source: From `open_source`; not quantized, or in this format.
        ignore: Modules of a source that is not quantized, left as they are (default: lm_head).
        observe: Called with module, original and packed weight of each linear that is quantized here.

    Yields:
        (module name, packed weight) for a quantized linear, (tensor name, tensor) for everything else.

    Raises:
        ValueError: A weight is incomplete or cannot be held, a group cannot share a scale, the source is in another
            format or in this one with other arguments, or holds experts in a format that does not.
    """
    check_held(source, form)
    if source.format is None:
        yield from pack(source.tensors(device), packed_names(source, form, ignore), form, observe)
    else:
        yield from _stored(source, form, device)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    linears: Set[str],
    form: WeightFormat = DEFAULT_FORMAT,
    observe: Observe | None = None,
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    """Quantize the weights of `linears` as they come; see `packed_stream`.

    Args:
        tensors: (name, tensor), in any order; every weight of `linears` among them.
        linears: Modules whose `weight` is packed; see `groups.linears_among`.
        observe: Called with module, original and packed weight of each linear, once it is quantized.
    """
    for name, item in in_groups(tensors, linears, form.shares_scale):
        if isinstance(item, torch.Tensor):
            yield name, item
            continue
        for module, packed in form.quantize_group(item).items():
            if observe:
                observe(module, item[module], packed)
            yield module, packed


def quantize_stream(
    tensors: Iterable[tuple[str, torch.Tensor]], linears: Set[str], form: WeightFormat
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint in `form`, one by one, as a sync sends them.

    Each weight is quantized where it is, from its bf16 value, which is what the actor's forward pass multiplies by. The
    rest is sent in bf16. For the arguments see `pack`.

    Yields:
        (`<module>.<part>`, tensor) for each part of a quantized linear, (name, tensor) for everything else.

    Raises:
        ValueError: A weight holds NaN or infinite values, or a group has not come whole.
    """
    rounded = ((name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor) for name, tensor in tensors)
    for name, item in pack(rounded, linears, form):
        yield from ((name, item),) if isinstance(item, torch.Tensor) else named_tensors(name, item).items()


def _stored(
    source: Source, form: WeightFormat, device: str | torch.device
) -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
    modules, rounded = packed_names(source, form), 0

    def weights() -> Iterator[tuple[str, PackedWeight | torch.Tensor]]:
        for name, item in whole_weights(source, modules, device, not form.quantizes_activations):
            if isinstance(item, torch.Tensor):
                yield name, item
            else:
                yield f"{name}.weight", form.from_tensors(f"{name!r} of {source.path}", item, source.layout)

    for name, item in in_groups(weights(), modules, form.shares_scale):
        if not isinstance(item, dict):
            yield name, item
            continue
        shared = form.with_shared_scale(item)
        rounded += sum(not form.is_exact(weight) for weight in shared.values())
        yield from shared.items()
    if rounded:
        logger.warning(
            "%s: the global scales of %d linears are no powers of two, so that their dense weights are rounded to bf16,"
            " by the actor and not by every kernel of the rollout: they differ by up to 2**-8 of a weight. Quantize the"
            " bf16 model with `python -m verl_qerl quantize` for the same weights on both sides.",
            source.path,
            rounded,
        )


def packed_names(source: Source, form: WeightFormat = DEFAULT_FORMAT, ignore: Sequence[str] | None = None) -> set[str]:
    """The modules that `packed_stream` packs; of a source that is not quantized see `linears_among`."""
    if source.format is None:
        return linears_among({name: spec.shape for name, spec in source.specs.items()}, ignore, str(source.path), form)
    # Any part but codes with the name of a dense weight makes a module a packed one, so that a missing part is noticed.
    marks = tuple(f".{part}" for part in form.layouts[source.layout] if part != "weight")
    return {name.rpartition(".")[0] for name in source.files if name.endswith(marks)}


def check_format(model: str | Path, stored: str | None, form: str) -> None:
    """Require weights that are not quantized, or in `form`."""
    if stored not in (None, form):
        use = "" if stored == BLOCK_FP8 else f"Use +rollout={stored}, or point"
        raise CheckpointFormatError(
            f"{model} is quantized in another format: {stored}, and {form} is asked for. Accepted are"
            f" unquantized weights and {form}. {use or 'Point'} model.path at the original bf16 model, or at what"
            f" `python -m verl_qerl quantize --requantize --format {form}` makes of this one."
        )


def check_held(source: Source, form: WeightFormat) -> None:
    """Require a checkpoint that this format can be made of, or that is in it.

    Raises:
        CheckpointFormatError: It is in another format, in this one with other arguments or other modules, holds
            experts, and the format does not, or is of a family that vLLM does not load in this format.
        ValueError: It is in this format, and experts are left out.
    """
    check_format(source.path, source.format, form.name)
    if source.format is not None:
        check_arguments(str(source.path), source.config, form)
        _check_modules(source, form)
    family = str(source.config.get("model_type"))
    if form.name not in (loaded := _LOADED.get(family, (form.name,))):
        raise CheckpointFormatError(
            f"vLLM does not load this family in {form.name}: model_type={family} of {source.path}. Accepted are"
            f" {', '.join((*loaded, 'other families'))}. Use one of them."
        )
    experts = sorted(name for name in source.files if is_expert(name.rpartition(".")[0]))
    if experts and not form.holds_experts:
        raise CheckpointFormatError(
            f"a mixture of experts is packed in another format: {form.name}, first {experts[0]!r} of {source.path}."
            f" Accepted is {', '.join(name for name, other in FORMATS.items() if other.holds_experts)}. Use it, or a"
            " model without experts."
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
    specs = source.specs
    codes = {name for name in source.linears(named) if DTYPES[specs[f"{name}.weight"].dtype].itemsize < 2}
    if lost := sorted(codes - packed):
        raise CheckpointFormatError(
            f"{source.path} holds codes and no scales of {lost[0]!r}. Both are needed. Download the model again."
        )
    check_all_packed(str(source.path), {name.rpartition(".")[0] for name in source.files} - packed)


def left_out(source: Source, form: WeightFormat, ignore: Sequence[str] | None = None) -> tuple[str, ...]:
    """The modules that are not packed, as rollout and actor are told.

    Others know more ways to leave linears out than names and `re:`: ModelOpt's wildcards, compressed-tensors' targets.
    So those of a packed checkpoint are the ones that it names, and by their full names the linears it holds unpacked.

    Args:
        ignore: Modules of a source that is not quantized (default: lm_head).

    Raises:
        ValueError: The format cannot be made of the source; see `check_held`.
    """
    check_held(source, form)
    if source.format is None:
        return tuple(ignore or DEFAULT_IGNORE)
    named, packed = ignored_modules(source.config), packed_names(source, form)
    return (*named, *sorted(source.linears(named) - packed))
