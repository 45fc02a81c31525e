"""Passes of a model whose linears are rounded to another format and back, for a while.

Rounding happens in the forward pass of each linear, on the weight as it is there: whole and in the dtype of the pass
under FSDP2. So nothing is saved or restored, and one more weight exists at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from verl_qerl import upstream
from verl_qerl.modules import hosts

# Weights of linears that are rounded together, by name -> the same, rounded.
RoundGroup = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@contextmanager
def rounded_linears(model: nn.Module, groups: Sequence[Sequence[str]], round_group: RoundGroup) -> Iterator[None]:
    """Let the linears multiply by rounded weights inside the context; not for training.

    Args:
        model: The linears keep their weights; only what they multiply by is rounded.
        groups: Names of linears that are rounded together, such as q, k and v where they share a scale. While one of
            them computes the weights of all must be there, as those of a decoder layer are under FSDP2.
        round_group: What rounding is; the result has shape and dtype of its argument.

    Raises:
        ValueError: There is nothing to round, or a name is not that of a linear.
    """
    linears = {name: model.get_submodule(name) for group in groups for name in group}
    odd = [name for name, linear in linears.items() if not isinstance(linear, nn.Linear)]
    if odd or not linears:
        raise ValueError(
            f"{len(odd)} of {len(linears)} modules to round are no linears: {odd[:1]}. Accepted are names of nn.Linear."
            " Check `ignore` and the model."
        )
    for group in groups:
        members = {name: linears[name] for name in group}
        for name, linear in members.items():
            upstream.set_method(hosts.LINEAR_FORWARD, linear, partial(_forward, name, members, round_group))
    try:
        yield
    finally:
        for linear in linears.values():
            upstream.reset_method(hosts.LINEAR_FORWARD, linear)


def _forward(name: str, members: Mapping[str, Any], round_group: RoundGroup, x: torch.Tensor) -> torch.Tensor:
    rounded = round_group({member: linear.weight for member, linear in members.items()})
    return F.linear(x, rounded[name], members[name].bias)
