"""Replace linears of a model by packed ones."""

from collections.abc import Callable, Iterator

import torch.nn as nn

from verl_qerl.modules.nvfp4_linear import NVFP4Linear


def replace_linears(
    model: nn.Module, match: Callable[[str], bool], kind: type[NVFP4Linear] = NVFP4Linear
) -> dict[str, NVFP4Linear]:
    """Put an unfilled NVFP4Linear in the place of every nn.Linear whose name matches.

    Args:
        model: Changed in place.
        match: Called with the module's name, e.g. `model.layers.0.self_attn.q_proj`.
        kind: NVFP4Linear or a subclass.

    Returns:
        name -> module put in place; fill each with `NVFP4Linear.fill`.

    Raises:
        ValueError: Nothing matched, or an in_features is not a multiple of 16.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear and match(name)]
    if not found:
        raise ValueError(
            f"no linear of {type(model).__name__} matched. Its linears are {_linear_kinds(model)}."
            " Check that the checkpoint belongs to this architecture."
        )
    replaced = {}
    for name, linear in found:
        parent, _, leaf = name.rpartition(".")
        try:
            replaced[name] = kind.from_linear(linear)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        setattr(model.get_submodule(parent), leaf, replaced[name])
    return replaced


def packed_linears(model: nn.Module) -> Iterator[tuple[str, NVFP4Linear]]:
    """(name, module) of every NVFP4Linear, in the order of `named_modules`, with PEFT's parts of the name removed."""
    for name, module in model.named_modules():
        if isinstance(module, NVFP4Linear):
            yield name.removeprefix("base_model.model.").removesuffix(".base_layer"), module


def _linear_kinds(model: nn.Module) -> str:
    kinds = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return ", ".join(sorted(kinds)) or "none"
