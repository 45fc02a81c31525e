"""A model's tensors, one by one, with its linears quantized: the one path for the rollout's loader and for every sync.

Each weight is quantized where it is (on the actor's GPU, before it goes through CUDA IPC: a half or a quarter of bf16's
bytes), from its bf16 value, which is what the actor's forward pass multiplies by. Only a group of linears that share a
scale is held, never the model.
"""

from collections.abc import Iterable, Iterator, Set

import torch

from verl_qerl.checkpoints.groups import in_groups
from verl_qerl.formats.base import WeightFormat


def quantize_stream(
    tensors: Iterable[tuple[str, torch.Tensor]],
    linears: Set[str],
    form: WeightFormat,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint in `form`.

    Args:
        tensors: (name, tensor) of a model; every weight of `linears` among them.
        linears: Modules whose `weight` is quantized; see `checkpoints.groups.linears_among`.
        form: The format.
        dtype: Everything is rounded to it first, and what is not quantized stays in it.

    Yields:
        (`<module>.<part>`, tensor) for each part of a quantized linear, (name, tensor) for everything else.

    Raises:
        ValueError: A weight holds NaN or infinite values, or a group has not come whole.
    """
    rounded = ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in tensors)
    for name, item in in_groups(rounded, linears, form.shares_scale):
        if isinstance(item, torch.Tensor):
            yield name, item
            continue
        for module, parts in form.quantize_group(item).items():
            for part, tensor in parts.items():
                yield f"{module}.{part}", tensor
