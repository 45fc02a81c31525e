"""Copies a new state of an adapter into vLLM's buffers, from device to device.

vLLM's way to replace one is to remove it, to copy every tensor into pinned host memory, and from there into the
buffers. Those are the same storage for as long as the engine lives, so that captured CUDA graphs see what is copied
into them. Here the whole adapter arrives as one tensor; where its parts go is found out, and checked, once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

Layout = tuple[tuple[str, tuple[int, int]], ...]  # name under which PEFT saves a tensor, and its shape, in order
_Span = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride and offset within the flat tensor


@dataclass
class _Plan:
    """How a flat adapter goes into the buffers.

    Attributes:
        copies: Part of a buffer and the span that it takes.
        scaled: Spans of all B.
        zeros: Parts of buffers beyond the adapter's rank, or of members that it leaves out.
        by_layer: Layers whose parts are no spans, with A and B for their `set_lora`.
        left_out: Layers without an adapter.
    """

    key: Any
    copies: list[tuple[torch.Tensor, _Span]] = field(default_factory=list)
    scaled: list[_Span] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    by_layer: list[tuple[Any, Any, Any]] = field(default_factory=list)
    left_out: list[Any] = field(default_factory=list)


def can_place(manager: Any) -> bool:
    """Whether the one slot is all that there is: nothing can bring back an earlier state from the host."""
    return manager.capacity == 1


def num_elements(layout: Layout) -> int:
    """Length of the flat tensor."""
    return sum(rows * columns for _, (rows, columns) in layout)


def place_adapter(
    manager: Any, lora_id: int, layout: Layout, flat: torch.Tensor, peft_config: Mapping[str, Any]
) -> int:
    """Write an adapter into its slot, which it gets if it has none, and return the number of linears written.

    Linears that it leaves out are reset. Everything is checked before anything is written.

    Args:
        manager: vLLM's LoRAModelManager, for which `can_place`.
        layout: What is where in `flat`: A [R, K] and B [N, R] of every linear.
        flat: One after the other, in the dtype of the buffers and on their device. It is changed.

    Raises:
        ValueError: A tensor belongs to no linear, has no counterpart or another shape than its linear takes.
    """
    from vllm.lora.peft_helper import PEFTHelper

    if flat.numel() != num_elements(layout):
        raise ValueError(
            f"the adapter has {flat.numel()} numbers. {len(layout)} tensors of {num_elements(layout)} are announced."
            " Send all of them, once."
        )
    helper = PEFTHelper.from_dict(dict(peft_config))
    helper.validate_legal(manager.lora_config)
    plan = getattr(manager, "qerl_plan", None)
    if plan is None or plan.key != (layout, helper.r):
        plan = _make_plan(manager, layout, flat, helper.r)
        manager.qerl_plan = plan
    _claim(manager, lora_id, helper.r)
    if helper.vllm_lora_scaling_factor != 1:
        torch._foreach_mul_([_part(flat, span) for span in plan.scaled], helper.vllm_lora_scaling_factor)
    if plan.copies:
        torch._foreach_copy_([place for place, _ in plan.copies], [_part(flat, span) for _, span in plan.copies])
    if plan.zeros:
        torch._foreach_zero_(plan.zeros)
    for layer, a, b in plan.by_layer:
        layer.set_lora(0, *(_each(partial(_part, flat), spans) for spans in (a, b)))
    for layer in plan.left_out:
        layer.reset_lora(0)
    return len(manager.modules) - len(plan.left_out)


@torch.no_grad()
def require_placed(manager: Any, lora_id: int, flat: torch.Tensor) -> None:
    """Read an adapter back from its slot, and compare bit by bit.

    Under tensor parallelism each worker compares the parts that it holds. Layers of vLLM's that are no linears, or with
    other slices than the adapter's, are not read: actors of ours adapt none.

    Args:
        flat: The adapter as `place_adapter` left it.

    Raises:
        ValueError: The slot is another's, or does not hold it.
    """
    plan = getattr(manager, "qerl_plan", None)
    if plan is None or lora_id not in manager.lora_index_to_id:
        raise _not_held("nothing was written")
    held = flat.clone()
    if plan.copies:
        torch._foreach_copy_([_part(held, span) for _, span in plan.copies], [place for place, _ in plan.copies])
    num_differing = int((held.view(torch.uint8) != flat.view(torch.uint8)).sum())
    if num_differing:
        raise _not_held(f"{num_differing} of {held.nbytes} bytes differ")
    empty = [*plan.zeros, *(buffer[0] for layer in plan.left_out for buffer in layer.lora_b_stacked)]
    if empty and not float(torch.stack(torch._foreach_norm(empty, float("inf"))).max()) == 0:
        raise _not_held("what it leaves out is not zero")
    for layer, a, b in plan.by_layer:
        halves = _sliced(layer, *(_each(partial(_part, flat), spans) for spans in (a, b)))
        for stacked, half in zip((layer.lora_a_stacked, layer.lora_b_stacked), halves or (), strict=False):
            for buffer, part in zip(stacked, half, strict=True):
                if part is not None and not torch.equal(buffer[0, 0, : part.shape[0], : part.shape[1]], part):
                    raise _not_held(f"a linear of {tuple(buffer.shape[2:])} differs")


def _not_held(reason: str) -> ValueError:
    return ValueError(
        f"the rollout does not hold the adapter that came: {reason}. Without it the rollout samples from an older"
        " policy. This is a defect of verl_qerl or vLLM: report it with both versions. Until then,"
        " `+actor_rollout_ref.rollout.engine_kwargs.vllm.max_cpu_loras=2` has vLLM load it, which is slower."
    )


def flatten(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[Layout, torch.Tensor]:
    """Named tensors of an adapter as `place_adapter` takes them; a ValueError if one is no matrix."""
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            raise ValueError(f"{name} of the adapter is {tuple(tensor.shape)}. Accepted are matrices. Send A and B.")
    layout = tuple((name, (tensor.shape[0], tensor.shape[1])) for name, tensor in tensors.items())
    return layout, torch.cat([tensor.to(dtype).reshape(-1) for tensor in tensors.values()])


def unflatten(layout: Layout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse of `flatten`: views of `flat`."""
    parts = flat.split([rows * columns for _, (rows, columns) in layout])
    return {name: part.view(shape) for (name, shape), part in zip(layout, parts, strict=True)}


def _claim(manager: Any, lora_id: int, rank: int) -> None:
    """Give the slot to the adapter, without the weights on the host that vLLM would keep of it."""
    from vllm.lora.lora_model import LoRAModel

    if lora_id in manager.lora_index_to_id:
        return
    manager.remove_adapter(lora_id)
    if len(manager) + 1 > manager.capacity:
        manager.remove_oldest_adapter()
    manager._registered_adapters[lora_id] = LoRAModel(lora_id, rank, {})  # its add_adapter wants weights
    manager.activate_adapter(lora_id)


def _part(flat: torch.Tensor, span: _Span) -> torch.Tensor:
    return flat.as_strided(*span)


def _each(function: Callable[[Any], Any], halves: Any) -> Any:
    """`function` of A or B of a linear, or of those of its members, of which some may be None."""
    if isinstance(halves, list):
        return [None if half is None else function(half) for half in halves]
    return function(halves)


def _span(tensor: torch.Tensor) -> _Span:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _make_plan(manager: Any, layout: Layout, flat: torch.Tensor, rank: int) -> _Plan:
    plan = _Plan((layout, rank))
    pairs = _pairs(manager, layout, flat)
    plan.scaled = [_span(b) for _, b in pairs.values()]
    for name, layer in manager.modules.items():
        members = manager.packed_modules.get(name, [name])
        found = [pairs.pop(member, None) for member in members]
        if all(pair is None for pair in found):
            plan.left_out.append(layer)
            continue
        a, b = ([None if pair is None else pair[half] for pair in found] for half in (0, 1))
        if name not in manager.packed_modules:
            a, b = a[0], b[0]
        if not _plan_linear(plan, name, layer, a, b, flat):
            plan.by_layer.append((layer, *(_each(_span, half) for half in (a, b))))
    if pairs:
        raise ValueError(
            f"{len(pairs)} modules of the adapter are none of this model's, first {sorted(pairs)[0]!r}. Accepted are"
            f" linears that vLLM can adapt. Train with target_modules among them."
        )
    return plan


def _plan_linear(plan: _Plan, name: str, layer: Any, a: Any, b: Any, flat: torch.Tensor) -> bool:
    """Add the copies of a linear; False where its part of A and B, under tensor parallelism, is not one span each."""
    halves = _sliced(layer, a, b)
    if halves is None:
        return False
    storage = flat.untyped_storage().data_ptr()
    if any(part is not None and part.untyped_storage().data_ptr() != storage for half in halves for part in half):
        return False
    for stacked, half, ranks in zip((layer.lora_a_stacked, layer.lora_b_stacked), halves, (0, 1), strict=True):
        for buffer, part in zip(stacked, half, strict=True):
            target = buffer[0, 0]
            if part is None:
                plan.zeros.append(target)
                continue
            rank = part.shape[ranks]
            if part.shape[1 - ranks] != target.shape[1 - ranks] or rank > target.shape[ranks]:
                raise ValueError(
                    f"lora_{'AB'[ranks]} of {name!r} is {tuple(part.shape)}. This linear takes {tuple(target.shape)},"
                    " with a rank of at most that. Train the model that the rollout serves."
                )
            plan.copies.append((target.narrow(ranks, 0, rank), _span(part)))
            if rank < target.shape[ranks]:
                plan.zeros.append(target.narrow(ranks, rank, target.shape[ranks] - rank))
    return True


def _sliced(layer: Any, a: Any, b: Any) -> list[Sequence[torch.Tensor | None]] | None:
    """A and B of a linear as this worker holds them, one of each slice; None where the slices are others."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    if not isinstance(layer, BaseLinearLayerWithLoRA) or (isinstance(b, list) and len(b) != layer.n_slices):
        return None
    sliced: list[Any] = [a, b] if layer.tp_size == 1 else [layer.slice_lora_a(a), layer.slice_lora_b(b)]
    return [half if isinstance(half, list) else [half] for half in sliced]


def _pairs(manager: Any, layout: Layout, flat: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> its A and B, as views of `flat`."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_unstacked_mapper"):  # from 0.25 on
        mapper = mapper.get_unstacked_mapper()
    halves: dict[str, dict[bool, torch.Tensor]] = {}
    for name, tensor in unflatten(layout, flat).items():
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        if is_a in halves.setdefault(module, {}):
            raise ValueError(f"the adapter has {name!r} twice. Accepted is one A and one B of each linear. Send one.")
        halves[module][is_a] = tensor
    for module, found in halves.items():
        if len(found) != 2:
            raise ValueError(
                f"the adapter has lora_{'A' if True in found else 'B'} of {module!r} alone. Accepted are pairs."
                " Send both."
            )
    return {module: (found[True], found[False]) for module, found in halves.items()}
