"""A new state of an adapter, from device to device into vLLM's buffers.

vLLM's way to replace one is to remove it, to copy every tensor into pinned host memory, and from there into the
buffers. Those are the same storage for as long as the adapter keeps its slot, so that captured CUDA graphs see what is
copied into them.
"""

from collections.abc import Mapping
from typing import Any

import torch


def can_overwrite(manager: Any, lora_id: int) -> bool:
    """Whether the adapter is in the buffers and nothing could bring back its earlier state from the host.

    Args:
        manager: vLLM's LoRAModelManager.
        lora_id: Of the adapter.
    """
    return lora_id in manager.lora_index_to_id and manager.capacity == 1


def overwrite_adapter(
    manager: Any, lora_id: int, tensors: Mapping[str, torch.Tensor], peft_config: Mapping[str, Any]
) -> int:
    """Write an adapter's tensors into the slot it has. Linears that it leaves out are reset.

    Args:
        manager: vLLM's LoRAModelManager, for which `can_overwrite`.
        lora_id: Of the adapter.
        tensors: Under PEFT's names; A [R, K] and B [N, R] of any float type, on the device of the buffers.
        peft_config: Its configuration, as a dictionary.

    Returns:
        Number of linears written.

    Raises:
        ValueError: A tensor belongs to no linear, or has no counterpart.
    """
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(dict(peft_config))
    helper.validate_legal(manager.lora_config)
    slot = manager.lora_index_to_id.index(lora_id)
    pairs = _pairs(manager, tensors, helper.vllm_lora_scaling_factor)
    written = 0
    for name, layer in manager.modules.items():
        members = manager.packed_modules.get(name, [name])
        found = [pairs.pop(member, (None, None)) for member in members]
        if all(a is None for a, _ in found):
            layer.reset_lora(slot)
            continue
        a, b = [a for a, _ in found], [b for _, b in found]
        packed = name in manager.packed_modules
        layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
        written += 1
    if pairs:
        raise ValueError(
            f"{len(pairs)} modules of the adapter are none of this model's, first {sorted(pairs)[0]!r}. Accepted are"
            f" linears that vLLM can adapt. Train with target_modules among them."
        )
    return written


def _pairs(
    manager: Any, tensors: Mapping[str, torch.Tensor], scaling: float
) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Module -> (A, B times the scaling), rounded as vLLM rounds them."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_unstacked_mapper"):  # from 0.25 on
        mapper = mapper.get_unstacked_mapper()
    dtype = manager.lora_config.lora_dtype
    halves: dict[str, dict[bool, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        tensor = tensor.to(dtype)
        halves.setdefault(module, {})[is_a] = tensor if is_a or scaling == 1 else tensor * scaling
    for module, found in halves.items():
        if len(found) != 2:
            raise ValueError(
                f"the adapter has lora_{'A' if True in found else 'B'} of {module!r} alone. Accepted are pairs."
                " Send both."
            )
    return {module: (found[True], found[False]) for module, found in halves.items()}
