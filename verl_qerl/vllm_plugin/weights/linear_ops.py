"""Operators of a packed linear, with and without an adapter: opaque to compilers, chosen by rows when they run."""

from typing import Any

import torch

from verl_qerl.kernels.rollout.lora import lora_expand, lora_shrink
from verl_qerl.kernels.rollout.repacking import Repacked, dequantize_repacked
from verl_qerl.kernels.rollout.w4a16_matmul import RANKS, Adapter, can_fuse, w4a16_matmul
from verl_qerl.vllm_plugin.weights.plans import PLANS, say_once


@torch.library.custom_op("verl_qerl::linear_repacked", mutates_args=())
def linear_repacked(
    x: torch.Tensor,
    packed_codes: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: str,
) -> torch.Tensor:
    """X W^T + bias.

    Args:
        x: [M, K] bf16.
        packed_codes: [K / 16, 2 N] int32, from `kernels.rollout.repacking.repack`.
        scale: [K / 16, N] uint8, from the same.
        global_decode_scale: [1] float32.
        bias: [N] bf16 or None.
        plan: Key of a Plan; constant, so that layers of one shape share their compiled code.

    Returns:
        [M, N] bf16.
    """
    return _decode_and_multiply(x, (packed_codes, scale, global_decode_scale), bias)


@linear_repacked.register_kernel("cuda")
def _linear_cuda(
    x: torch.Tensor,
    packed_codes: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: str,
) -> torch.Tensor:
    chosen, rows = PLANS[plan], x.shape[0]
    if chosen.uses_kernel(rows):
        return w4a16_matmul(x.contiguous(), packed_codes, scale, global_decode_scale, bias, launch=chosen.launch(rows))
    return _decode_and_multiply(x, (packed_codes, scale, global_decode_scale), bias)


def _decode_and_multiply(x: torch.Tensor, weight: Repacked, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, dequantize_repacked(*weight), bias)


@linear_repacked.register_fake
def _output(x: torch.Tensor, packed_codes: torch.Tensor, scale: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], scale.shape[1]))


@torch.library.custom_op("verl_qerl::lora_linear_repacked", mutates_args=())
def lora_linear_repacked(
    x: torch.Tensor,
    packed_codes: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: str,
    a: torch.Tensor,
    b: torch.Tensor,
    members: torch.Tensor,
    slots: torch.Tensor,
    none_active: torch.Tensor,
) -> torch.Tensor:
    """`linear_repacked` and the product of one adapter, which our own kernel adds in the same launch.

    The arguments of the adapter are those of `kernels.rollout.lora.lora_shrink` and `lora_expand`.

    Returns:
        [M, N] bf16.
    """
    y = linear_repacked(x, packed_codes, scale, global_decode_scale, None, plan)
    return lora_expand(y, lora_shrink(x, a, none_active), b, members, slots, none_active, bias, x.shape[1])


@lora_linear_repacked.register_kernel("cuda")
def _lora_linear_cuda(
    x: torch.Tensor,
    packed_codes: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: str,
    a: torch.Tensor,
    b: torch.Tensor,
    members: torch.Tensor,
    slots: torch.Tensor,
    none_active: torch.Tensor,
) -> torch.Tensor:
    weight = (packed_codes, scale, global_decode_scale)
    if none_active.item():
        return linear_repacked(x, *weight, bias, plan)
    x = x.contiguous()
    chosen, rows = PLANS[plan], x.shape[0]
    if chosen.uses_kernel(rows):
        launch = chosen.launch(rows)
        if can_fuse(a, b, members, launch):
            return w4a16_matmul(x, *weight, bias, Adapter(a, b, members, slots), launch)
        say_once(
            f"linears of {plan} take three launches with an adapter of rank {b.shape[1]}: the one that does it takes"
            f" ranks {', '.join(map(str, RANKS))}, and members of whole tiles."
        )
    partial = lora_shrink(x, a, none_active)
    y = linear_repacked(x, *weight, None, plan)
    return lora_expand(y, partial, b, members, slots, none_active, bias, x.shape[1])


lora_linear_repacked.register_fake(_output)
