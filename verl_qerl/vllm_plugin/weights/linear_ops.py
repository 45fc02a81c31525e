"""Operators of a packed linear, with and without an adapter: opaque to compilers, chosen by rows when they run."""

from typing import Any

import torch
import torch.nn.functional as F

from verl_qerl.kernels.rollout.lora import lora_expand, lora_shrink
from verl_qerl.kernels.rollout.repacking import Repacked, decode
from verl_qerl.kernels.rollout.w4a16_matmul import RANKS, Adapter, can_fuse, w4a16_matmul
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.weights.plans import PLANS


@torch.library.custom_op("verl_qerl::linear_repacked", mutates_args=())
def linear_repacked(
    x: torch.Tensor,
    packed_codes: torch.Tensor,
    scale: torch.Tensor,
    global_decode_scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: str,
) -> torch.Tensor:
    """X W^T + bias; tensors as of `kernels.rollout.w4a16_matmul`.

    Args:
        plan: Key of a Plan, or "" without a GPU; constant, so that layers of one shape share their compiled code.

    Returns:
        [M, N] bf16.
    """
    return _linear(x, (packed_codes, scale, global_decode_scale), bias, plan)


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
    """`linear_repacked` and the product of one adapter, summed with it before the output is rounded.

    Only where our kernel multiplies and cannot add the adapter (`can_fuse`), it is added to an output that is rounded.
    The arguments of the adapter are those of `kernels.rollout.lora.lora_shrink` and `lora_expand`, which do that.
    """
    weight, rows = (packed_codes, scale, global_decode_scale), x.shape[0]
    if none_active.item():
        return _linear(x, weight, bias, plan)
    adapter = Adapter(a, b, members, slots)
    if not plan or not PLANS[plan].uses_kernel(rows):
        return _dense(x, weight, bias, adapter)
    x, launch = x.contiguous(), PLANS[plan].launch(rows)
    if can_fuse(a, b, members, launch):
        return w4a16_matmul(x, *weight, bias, adapter, launch)
    say_once(
        f"linears of {plan} take three launches with an adapter of rank {b.shape[1]}: the one that does it takes"
        f" ranks {', '.join(map(str, RANKS))}, and members of whole tiles."
    )
    partial = lora_shrink(x, a, none_active)
    y = _linear(x, weight, None, plan)
    return lora_expand(y, partial, b, members, slots, none_active, bias, x.shape[1])


def _linear(x: torch.Tensor, weight: Repacked, bias: torch.Tensor | None, plan: str) -> torch.Tensor:
    rows = x.shape[0]
    if plan and PLANS[plan].uses_kernel(rows):
        return w4a16_matmul(x.contiguous(), *weight, bias, launch=PLANS[plan].launch(rows))
    return F.linear(x, decode(*weight), bias)


def _dense(x: torch.Tensor, weight: Repacked, bias: torch.Tensor | None, adapter: Adapter) -> torch.Tensor:
    """One product of x and x A^T, beside each other, with W and B (see `kernels.actor.adapted_linear`)."""
    a, b, members, slots = adapter
    K, (N, rank), columns = x.shape[1], b.shape, len(a)
    low = (x @ a.t()) * (slots[: len(x), None] >= 0)
    wide = decode(*weight, columns)
    if columns == rank:
        wide[:, K:].copy_(b)
    else:  # rows of a member have its own columns of the adapter, and zeros in those of the others
        own = members[:, None] == torch.arange(columns // rank, device=members.device)
        tiles = wide[:, K:].view(len(own), N // len(own), -1, rank)
        torch.mul(b.view(len(own), -1, 1, rank), own[:, None, :, None], out=tiles)
    return F.linear(torch.cat((x, low), 1), wide, bias)


@linear_repacked.register_fake
@lora_linear_repacked.register_fake
def _output(x: torch.Tensor, packed_codes: torch.Tensor, scale: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], scale.shape[1]))
