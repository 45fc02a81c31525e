"""Weights with their adapter merged, made one by one as they are sent.

verl merges in place: before, it copies the whole model to the CPU, and afterwards back. Of 1.5 billion parameters in
float32 that takes longer than all else of a sync.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from peft.tuners.lora import Linear, LoraLayer
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import fsdp_version, normalize_peft_param_name, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys


def adapted_weights(module: nn.Module) -> dict[str, Linear] | None:
    """The adapted linears of an FSDP2 module by the names of their weights in its state dict.

    Returns:
        None where a merge is more than adding B A to a weight, and is left to verl: FSDP1, experts, embeddings, DoRA,
        adapters with a bias, and modules whose weights have other names in the state dict.
    """
    layers: dict[str, Any] = {
        f"{name}.base_layer.weight": layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)
    }
    plain = fsdp_version(module) == 2 and all(_is_plain(layer) for layer in layers.values())
    return layers if plain and layers.keys() <= module.state_dict().keys() else None


def _is_plain(layer: Any) -> bool:
    one = type(layer) is Linear and len(layer.active_adapters) == 1 and not (layer.merged or layer.disable_adapters)
    return one and not layer.lora_variant and not any(layer.lora_bias.values())


def merged_parameters(engine: Any, adapted: dict[str, Linear]) -> Iterator[tuple[str, torch.Tensor]]:
    """What verl's `FSDPEngine._merged_lora_per_tensor_param` yields, to the bit; the model is not touched.

    An adapter outside the layers that FSDP2 wraps, as of `lm_head`, is merged too; verl leaves it out.

    Args:
        engine: verl's FSDP engine, its model on the device unless FSDP2 offloads it. Offloaded when all is sent, where
            verl would.
        adapted: The linears with an adapter, each by the name of its weight in the module's state dict.

    Yields:
        Name in the checkpoint and whole tensor, bf16 on the device.
    """
    module, device = engine.module, get_device_id()

    def in_checkpoint(tensors: dict[str, Any]) -> dict[str, Any]:
        return convert_weight_keys(normalize_peft_param_name(tensors), module)

    layers = in_checkpoint(adapted)
    try:
        for name, tensor in in_checkpoint(module.state_dict()).items():
            if name in layers:
                tensor = _with_adapter(layers[name], tensor)
            if isinstance(tensor, DTensor):
                shard: Any = tensor.to(device, non_blocking=True)
                yield name, shard.full_tensor().to(torch.bfloat16, non_blocking=True)
            else:
                yield name, tensor.detach().clone()
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(module)


@torch.no_grad()
def _with_adapter(layer: Linear, weight: torch.Tensor) -> torch.Tensor:
    """The sum in a new tensor of the weight's dtype."""
    (adapter,) = layer.active_adapters
    return (weight + layer.get_delta_weight(adapter)).to(weight.dtype)
