"""Norm and activation before a packed linear with an adapter: opaque operators, which may make X A^T for it.

They do for batches of the size that the option `fuse_shrink` names, up to MAX_ROWS, while a token has the adapter; else
they are what `kernels.elementwise` has.
"""

from typing import Any, NamedTuple

import torch

from verl_qerl.kernels.elementwise import add_rms_norm, can_silu, silu_mul
from verl_qerl.kernels.elementwise_low import add_rms_norm_low, silu_mul_low
from verl_qerl.kernels.tiled_matmul import RANKS, can_fuse
from verl_qerl.vllm_plugin.linear import tiled_tensors
from verl_qerl.vllm_plugin.options import FUSED_ROWS
from verl_qerl.vllm_plugin.plans import PLANS

BATCHES: dict[str, frozenset[int]] = {}  # sizes of those for which X A^T is made


class Fed(NamedTuple):
    """The linear that takes what a norm or an activation gives, as the operators here want it.

    Attributes:
        a: [L R, K] bf16, of its adapter, like all up to `none_active`; as in `kernels.lora`.
        slots: [>= M] int64.
        none_active: One bool on the CPU.
        global_decode_scale: [1] float32.
        batches: Key of BATCHES; constant, so that layers of one shape share their compiled code.
    """

    a: torch.Tensor
    slots: torch.Tensor
    none_active: torch.Tensor
    global_decode_scale: torch.Tensor
    batches: str


def fed_linear(layer: Any, least: int) -> Fed | None:
    """Of a LoRA layer on the path for one adapter whose packed linear can add it in its launch; None for others.

    Args:
        layer: vLLM's.
        least: Rows from which X A^T is made for it.
    """
    base: Any = getattr(layer, "base_layer", None)
    if not hasattr(layer, "qerl_a") or not getattr(base, "qerl_plan", "") or layer.qerl_b.shape[1] not in RANKS:
        return None
    _, _, scale, dense = tiled_tensors(base)
    batches = make_batches(base.qerl_plan, layer.qerl_a, layer.qerl_b, layer.qerl_members, dense is not None, least)
    return Fed(layer.qerl_a, layer.punica_wrapper._token_lora_indices, layer.qerl_none_active, scale, batches)


def make_batches(plan: str, a: torch.Tensor, b: torch.Tensor, members: torch.Tensor, resident: bool, least: int) -> str:
    """Key of the batches for which a linear takes X A^T, made on first use: as `tiled_ops` chooses its kernel.

    Args:
        plan: Key of its Plan.
        a: As in `kernels.lora`, like all up to `members`.
        b: As there.
        members: As there.
        resident: Whether it has a bf16 copy.
        least: Rows of the smallest.
    """
    key = f"{plan} rank {b.shape[1]} of {len(a)} tiles {len(members)} resident {resident} from {least}"
    if key not in BATCHES:
        of = PLANS[plan]
        rows = range(least, FUSED_ROWS + 1)
        BATCHES[key] = frozenset(M for M in rows if of.is_tiled(M, resident) and can_fuse(a, b, members, of.launch(M)))
    return key


@torch.library.custom_op("verl_qerl::add_rms_norm_low", mutates_args=())
def norm_for_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    a: torch.Tensor,
    slots: torch.Tensor,
    none_active: torch.Tensor,
    global_decode_scale: torch.Tensor,
    batches: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.elementwise.add_rms_norm`, with X A^T for the linear that follows.

    Args:
        x: As there, like all up to `epsilon`; [M, K].
        residual: As there.
        weight: As there.
        epsilon: As there.
        a: As in `Fed`, like all that follow.
        slots: As there.
        none_active: As there.
        global_decode_scale: As there.
        batches: As there.

    Returns:
        As `add_rms_norm`.
    """
    return add_rms_norm(x, residual, weight, epsilon)


@norm_for_linear.register_kernel("cuda")
def _norm_cuda(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *fed: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    linear = Fed(*fed)
    if not _makes_low(x.shape[0], linear):
        return add_rms_norm(x, residual, weight, epsilon)
    made = (linear.a, linear.slots, linear.global_decode_scale)
    return add_rms_norm_low(x.contiguous(), residual.contiguous(), weight, epsilon, *made)


@norm_for_linear.register_fake
def _norm_fake(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("verl_qerl::silu_mul_low", mutates_args=())
def silu_for_linear(
    x: torch.Tensor,
    a: torch.Tensor,
    slots: torch.Tensor,
    none_active: torch.Tensor,
    global_decode_scale: torch.Tensor,
    batches: str,
) -> torch.Tensor:
    """`kernels.elementwise.silu_mul`, with X A^T for the linear that follows.

    Args:
        x: [M, 2 K] bf16.
        a: As in `Fed`, like all that follow.
        slots: As there.
        none_active: As there.
        global_decode_scale: As there.
        batches: As there.

    Returns:
        As `silu_mul`.
    """
    return silu_mul(x)


@silu_for_linear.register_kernel("cuda")
def _silu_cuda(x: torch.Tensor, *fed: Any) -> torch.Tensor:
    linear = Fed(*fed)
    if not _makes_low(x.shape[0], linear) or not can_silu(x):
        return silu_mul(x)
    return silu_mul_low(x.contiguous(), linear.a, linear.slots, linear.global_decode_scale)


@silu_for_linear.register_fake
def _silu_fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _makes_low(rows: int, fed: Fed) -> bool:
    return rows in BATCHES[fed.batches] and not fed.none_active.item()
