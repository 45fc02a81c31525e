"""Replace linears and experts of a model by packed ones."""

from collections.abc import Callable, Iterator

import torch.nn as nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from verl_qerl.formats import PackedWeight
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.nvfp4_experts import ExpertLinear, NVFP4Experts
from verl_qerl.modules.packed_linear import PackedLinear


def replace_linears(
    model: nn.Module, match: Callable[[str], bool], kind: type[PackedLinear] = NVFP4Linear
) -> dict[str, PackedLinear]:
    """Put an unfilled PackedLinear in the place of every nn.Linear whose name matches.

    Args:
        match: Called with the module's name, e.g. `model.layers.0.self_attn.q_proj`.

    Returns:
        name -> module put in place; fill each with `PackedLinear.fill`.

    Raises:
        ValueError: Nothing matched, or an in_features is not a multiple of the block size.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear and match(name)]
    if not found:
        kinds = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        raise ValueError(
            f"no linear of {type(model).__name__} matched. Its linears are {', '.join(sorted(kinds)) or 'none'}."
            " Check that the checkpoint belongs to this architecture."
        )
    replaced = {}
    for name, linear in found:
        replaced[name] = kind.from_linear(linear, name)
        model.set_submodule(name, replaced[name])
    return replaced


def replace_experts(model: nn.Module) -> dict[str, ExpertLinear]:
    """Put unfilled NVFP4Experts in the place of all experts of a mixture-of-experts model; a dense model has none.

    Returns:
        name as in a checkpoint, e.g. `model.layers.0.mlp.experts.5.up_proj` -> its place; fill each.

    Raises:
        ValueError: A size is not a multiple of 16.
    """
    places: dict[str, ExpertLinear] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Qwen3MoeExperts):
            experts = NVFP4Experts.from_experts(module)
            model.set_submodule(name, experts)
            places |= {f"{name}.{linear}": place for linear, place in experts.linears()}
    return places


def packed_weights(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """(name as in a checkpoint, weight) of every PackedLinear and of every expert's linears."""
    for name, linear in packed_linears(model):
        yield name, linear.packed()
    for name, module in model.named_modules():
        if isinstance(module, NVFP4Experts):
            for linear, place in module.linears():
                yield f"{_without_peft(name)}.{linear}", place.packed()


def packed_linears(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """(name, module) of every PackedLinear, in the order of `named_modules`, with PEFT's parts of the name removed."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield _without_peft(name), module


def _without_peft(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".base_layer")
