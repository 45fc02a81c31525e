"""Mixtures of experts in the rollout: experts packed in NVFP4, router in bf16, adapters on the attention alone.

On a GPU the experts run on vLLM's own kernel for weight-only NVFP4 (Marlin). Without a GPU vLLM has none; the reference
below decodes them once and goes on as vLLM does with bf16 experts.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4,
)
from vllm.platforms import current_platform

from verl_qerl import upstream
from verl_qerl.checkpoints.experts import ADAPTED
from verl_qerl.formats import get_format
from verl_qerl.formats.nvfp4_layout import BLOCK_SCALE, CODES, GLOBAL_SCALE
from verl_qerl.kernels.actor.dequantize import dequantize_nvfp4
from verl_qerl.vllm_plugin import hosts

_PARTS = (CODES, BLOCK_SCALE, GLOBAL_SCALE)
_UNREAD = "input_global_scale"  # of activations; vLLM makes room for it, weight-only kernels do not read it


def experts_method(layer: Any, prefix: str, form: str = "nvfp4") -> Any:
    """The method of `layer`, called `prefix`, where it is not vLLM's own choice.

    Returns:
        A method of packed experts without a GPU; None: not experts, or vLLM's own.

    Raises:
        ValueError: The format or the arrangement of the experts is not supported.
    """
    if not isinstance(layer, RoutedExperts):
        return None
    if not get_format(form).holds_experts:
        raise ValueError(
            f"experts are quantized in another format: rollout={form}, {prefix!r}. Accepted is nvfp4, with adapters."
            " Use +rollout=nvfp4."
        )
    parallel = layer.moe_config.moe_parallel_config
    if parallel.use_ep:
        raise ValueError(
            f"experts are spread over ranks: enable_expert_parallel=True, {prefix!r}. Tensor parallelism is accepted,"
            " which cuts every expert. Leave enable_expert_parallel out."
        )
    _keep_adapters_off_experts()
    return ReferenceExperts(layer.moe_config) if current_platform.is_cpu() else None


def _keep_adapters_off_experts() -> None:
    # Else vLLM wraps the experts too: with its slower path, and gigabytes of buffers that no adapter of ours fills.
    config = get_current_vllm_config_or_none()
    lora = config.lora_config if config is not None else None
    if lora is None or set(lora.target_modules or ()) == set(ADAPTED):
        return
    if lora.target_modules is not None:
        raise ValueError(
            f"adapters of a mixture of experts: lora_target_modules={lora.target_modules}. Accepted are"
            f" {', '.join(ADAPTED)}. Leave the option out."
        )
    upstream.set_data(hosts.LORA_TARGETS, lora, target_modules=list(ADAPTED))


def expert_members(model: torch.nn.Module) -> dict[str, set[str]]:
    """Parameter of packed experts -> the names under which a checkpoint holds it, of every expert.

    vLLM itself calls such a parameter loaded once one linear of one expert has come, 0.27 under another name.
    """
    members: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and hasattr(module, "w13_weight_packed"):
            experts = [f"{name.removesuffix('.routed_experts')}.{e}" for e in range(module.global_num_experts)]
            for weight, linears in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
                for part in _PARTS:
                    wanted = {f"{expert}.{linear}.{part}" for expert in experts for linear in linears}
                    members[f"{name}.{weight}_{part}"] = wanted
                members[f"{name}.{weight}_{_UNREAD}"] = set()
    return members


class ReferenceExperts(UnquantizedFusedMoEMethod):
    """Decodes all experts after loading: exact, and as large as bf16."""

    group_size = 16

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """The packed tensors, as vLLM's own method for a GPU has them."""
        nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod.create_weights(self, layer, *args, **kwargs)  # type: ignore[arg-type]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace them by dense ones: w13_weight [E, 2 I, H], gate above up, and w2_weight [E, H, I]."""
        for name in ("w13", "w2"):
            codes, scale, divisors = (getattr(layer, f"{name}_{part}").data for part in _PARTS)
            rows = codes.flatten(0, 1), scale.view(torch.uint8).flatten(0, 1)
            # Divisors are [E], or [E, 2] for gate and up.
            dense = dequantize_nvfp4(*rows, 1.0 / divisors.flatten(), layer.params_dtype).view(*codes.shape[:2], -1)
            layer.register_parameter(f"{name}_weight", torch.nn.Parameter(dense, requires_grad=False))
            for part in (*_PARTS, _UNREAD):
                delattr(layer, f"{name}_{part}")
        super().process_weights_after_loading(layer)
