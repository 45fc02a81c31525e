"""Which linears of a model are quantized, and which of them come together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from verl_qerl.checkpoints.experts import check_all_packed, linears_of_experts
from verl_qerl.formats import DEFAULT_FORMAT, WeightFormat
from verl_qerl.formats.ignore import DEFAULT_IGNORE, check_rules, ignore_rules, linears_in
from verl_qerl.formats.nvfp4_layout import fused_group


def linears_among(
    shapes: Mapping[str, Sequence[int]], ignore: Sequence[str] | None, where: str, form: WeightFormat = DEFAULT_FORMAT
) -> set[str]:
    """The modules whose weights are quantized.

    Args:
        shapes: tensor name -> shape, of a whole model.
        ignore: Modules left in bf16 (default: lm_head).

    Raises:
        ValueError: There is none, `ignore` names no module, one has in_features that the format cannot hold, a fused
            group is ignored in part, or experts are stacked or ignored.
    """
    rules = ignore_rules(ignore if ignore is not None else DEFAULT_IGNORE)
    modules = {name.rpartition(".")[0] for name in shapes}
    check_rules(rules, modules, where)
    found = linears_in(shapes, rules)
    if not found:
        raise ValueError(
            f"{where} holds no linear to quantize: ignore={list(rules)}. Matrices named "
            "`...layers.<i>...weight` are quantized. Check the model family and `ignore`."
        )
    linears_of_experts(where, shapes)  # a full-precision actor stacks them
    check_all_packed(where, modules - set(found))
    for module, (_, in_features) in found.items():
        form.check_in_features(module, in_features)
        members = [name for name in fused_group(module)[1] if f"{name}.weight" in shapes]
        left_out = sorted(set(members) - set(found))
        if left_out:
            raise ValueError(
                f"a group of linears that vLLM runs as one is ignored in part: ignored={left_out} of {members}. "
                "All or none of them are quantized. Name all of them in `ignore`, or none."
            )
    return set(found)


def groups_of_linears(linears: Iterable[str], form: WeightFormat) -> list[list[str]]:
    """The linears as `form` quantizes them: each alone, or those together that share a scale."""
    groups: dict[str, list[str]] = {}
    for name in sorted(linears):
        groups.setdefault(fused_group(name)[0] if form.shares_scale else name, []).append(name)
    return list(groups.values())


def in_groups(
    tensors: Iterable[tuple[str, Any]], linears: Set[str], together: bool = True
) -> Iterator[tuple[str, Any]]:
    """Collect the weights of `linears` that vLLM fuses; holds a group at a time when they come in order of layers.

    Args:
        tensors: (name, tensor), in any order; every weight of `linears` among them, as a tensor or packed.
        together: False makes every linear a group of its own.

    Yields:
        (key, {module: weight}) for a group that is whole, (name, tensor) for everything else.

    Raises:
        ValueError: The tensors ended and a group is not whole.
    """
    waiting: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        if module == name or module not in linears:
            yield name, tensor
            continue
        key, members = fused_group(module) if together else (module, (module,))
        group = waiting.setdefault(key, {})
        group[module] = tensor
        if set(group) == linears & set(members):
            yield key, waiting.pop(key)
    if waiting:
        raise ValueError(
            f"the weights of {len(waiting)} groups of linears have not all come, first {next(iter(waiting))!r}."
            " Every linear of a model is needed. Check that the checkpoint is whole."
        )
