"""The kernel of a packed linear: one copy of the weight, multiplied as its Plan says for the number of rows.

Few rows go to `kernels.rollout.w4a16_matmul`, many to cuBLAS over a bf16 weight decoded on the spot: the same values.
"""

import math
from typing import Any

import torch
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

from verl_qerl.formats.nvfp4 import BLOCK_SIZE, nvfp4_weight
from verl_qerl.kernels.rollout.repacking import Repacked, repack
from verl_qerl.kernels.rollout.w4a16_launch import MULTIPLE
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.options import STOCK_LINEAR
from verl_qerl.vllm_plugin.weights.linear_ops import linear_repacked
from verl_qerl.vllm_plugin.weights.plans import make_plan

_LEAST_NORMAL = 8  # bits of 2**-6 in E4M3


class Everywhere:
    """Answers to vLLM's questions about a kernel, for those that a scheme of ours makes only where they fit."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Always."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Always."""
        return True, None


class W4A16Kernel(Everywhere, NvFp4LinearKernel):
    """Chooses the kernel by the number of rows; a linear that our kernels do not take stays on Marlin."""

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self._marlin = MarlinNvFp4LinearKernel(config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weight; vLLM's names hold the repacked tensors afterwards.

        New weights of a layer go where its first ones went: vLLM copies them into the same storage, and captured graphs
        call the same kernel. A ValueError if our kernels took those and do not take these.
        """
        if hasattr(layer, "workspace"):  # of Marlin
            self._marlin.process_weights_after_loading(layer)
            return
        packed = nvfp4_weight(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        try:
            plan = plan_for(*packed.shape, layer, packed.block_scale)
        except ValueError as error:
            if hasattr(layer, "qerl_plan"):
                raise ValueError(
                    f"new weights of a linear cannot be loaded: {error} A running engine keeps the layout of the first"
                    f" ones. Accepted are weights that fit it. Start it with {STOCK_LINEAR}."
                ) from error
            say_once(f"NVFP4 linears run on Marlin: {error}")
            self._marlin.process_weights_after_loading(layer)
            return
        hold_repacked(layer, repack(packed), plan)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X W^T + bias; x [..., K], result [..., N]."""
        if not hasattr(layer, "qerl_plan"):
            return self._marlin.apply_weights(layer, x, bias)
        return multiply(layer, x, bias)


def plan_for(N: int, K: int, layer: Any, block_scale: torch.Tensor) -> str:
    """Key of the plan for a layer's weight [N, K] on its block scales' GPU; a ValueError if our kernels do not take it.

    Args:
        layer: vLLM's, with `params_dtype` and `logical_widths`, the columns of each member of a fused linear.
        block_scale: E4M3 scales of the weight, in any layout and on its GPU.
    """
    dtype, tile = layer.params_dtype, math.gcd(128, *layer.logical_widths)
    if N % MULTIPLE or K % MULTIPLE or dtype != torch.bfloat16:
        raise ValueError(f"{N} x {K} in {dtype}: the faster kernel takes bf16 and multiples of {MULTIPLE}.")
    if not bool((block_scale.view(torch.uint8) >= _LEAST_NORMAL).all()):
        raise ValueError(f"{N} x {K} with block scales below 2**-6: the faster kernel takes none.")
    return make_plan(N, K, torch.cuda.get_device_name(block_scale.device), tile)


def hold_repacked(layer: Any, tiles: Repacked, plan: str) -> None:
    """Give a layer what `multiply` reads, under vLLM's names.

    Args:
        tiles: The repacked weight; not copied.
        plan: Key of a Plan.
    """
    layer.qerl_plan = plan
    layer.weight, layer.weight_scale, layer.weight_global_scale = map(frozen, tiles)


def multiply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X W^T + bias over what `hold_repacked` prepared; x [..., K], result [..., N]."""
    y = linear_repacked(x.reshape(-1, x.shape[-1]), *repacked_tensors(layer), bias, layer.qerl_plan)
    return y.view(*x.shape[:-1], y.shape[-1])


def repacked_tensors(layer: Any) -> Repacked:
    """packed_codes, scale and global_decode_scale of `linear_repacked`; the layer is from `hold_repacked`."""
    return layer.weight, layer.weight_scale, layer.weight_global_scale


def repacked_in_features(model: torch.nn.Module) -> set[int]:
    """in_features of the linears of a model that choose a kernel by rows, as `hold_repacked` prepared them on a GPU."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "qerl_plan", "")]
    return {layer.weight.shape[0] * BLOCK_SIZE for layer in layers}


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The tensor as a parameter that is not trained; no copy."""
    return torch.nn.Parameter(tensor, requires_grad=False)
