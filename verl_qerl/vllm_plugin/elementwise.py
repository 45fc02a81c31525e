"""vLLM's norms, activations and rotary positions beside tiled linears, on `kernels.elementwise`.

The next linear brings its weights while they run, which compiled code that torch makes of vLLM's own does not allow.
"""

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from verl_qerl.kernels.elementwise import (
    add_rms_norm,
    can_normalize,
    can_rotate,
    can_silu,
    prepare,
    rms_norm,
    rotate,
    silu_mul,
)
from verl_qerl.kernels.elementwise_low import prepare as prepare_low
from verl_qerl.kernels.tiled_matmul import prepare as prepare_matmul
from verl_qerl.vllm_plugin.low_ops import (
    Fed,
    can_feed_norm,
    can_feed_silu,
    fed_linear,
    norm_for_linear,
    silu_for_linear,
)
from verl_qerl.vllm_plugin.plans import PLANS

# Of a decoder layer: what gives X, and the linear that takes it and nothing else.
_FEEDS = (
    ("input_layernorm", "self_attn.qkv_proj"),
    ("post_attention_layernorm", "mlp.gate_up_proj"),
    ("mlp.act_fn", "mlp.down_proj"),
)


class EarlyRMSNorm(RMSNorm):
    """Of rows of a model's hidden size, with a weight."""

    qerl_fed: Fed | None = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As vLLM's `forward_native`: the normalized x, or that of the sum and the sum."""
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        if self.qerl_fed is not None and x.ndim == 2:
            return norm_for_linear(x, residual, self.weight.data, self.variance_epsilon, *self.qerl_fed)
        return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class EarlySiluAndMul(SiluAndMul):
    """SiLU of the left half of a row, times its right half."""

    qerl_fed: Fed | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As vLLM's `forward_native`; x [..., 2 I], result [..., I]."""
        if self.qerl_fed is not None and x.ndim == 2:
            return silu_for_linear(x, *self.qerl_fed)
        return silu_mul(x) if can_silu(x) else self.forward_native(x)


class EarlyRotaryEmbedding(RotaryEmbedding):
    """Of whole heads, their halves turned together."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As vLLM's `forward_native`; query and key [T, heads * head_size]."""
        table = self._match_cos_sin_cache_dtype(query)
        if key is None or not can_rotate(query, key, positions, table, self.head_size):
            return self.forward_native(positions, query, key)
        return rotate(query, key, positions, table, self.head_size)


_EARLY: dict[type, type] = {
    RMSNorm: EarlyRMSNorm,
    SiluAndMul: EarlySiluAndMul,
    RotaryEmbedding: EarlyRotaryEmbedding,
}


def use_early_starts(model: torch.nn.Module, columns: set[int], norms: bool = True) -> int:
    """Replace norms, activations and rotary positions by those that let the next kernel start early.

    Call it after loading and before anything is compiled. Subclasses of vLLM's modules, and norms of other rows (those
    of a head), stay as they are.

    Args:
        model: vLLM's.
        columns: Of `linear.tiled_columns`; where there are none, nothing is replaced.
        norms: Norms too.

    Returns:
        Number of modules replaced.
    """
    found: list[Any] = [module for module in model.modules() if columns and _is_ours(module, columns, norms)]
    for module in found:
        module.__class__ = _EARLY[type(module)]
    weights = [module.weight for module in found if isinstance(module, RMSNorm)]
    if found and next(model.parameters()).is_cuda:
        prepare({(weight.shape[0], weight.dtype) for weight in weights})
    return len(found)


def fuse_shrink(model: torch.nn.Module, least: int) -> int:
    """Have norms and activations make X A^T of the adapted linear that they feed, after `use_early_starts`.

    Args:
        model: vLLM's, its LoRA layers on the path for one adapter.
        least: Rows from which they do.

    Returns:
        Number of linears fed.
    """
    count = 0
    for layer in model.modules():
        for giver_name, taker_name in _FEEDS:
            giver, taker = (_descendant(layer, name) for name in (giver_name, taker_name))
            fed = fed_linear(taker, least)
            if fed is None or not _can_feed(giver, fed):
                continue
            giver.qerl_fed = fed
            if fed.a.is_cuda:
                of_norm = (fed.a.shape[1], giver.weight.dtype) if isinstance(giver, EarlyRMSNorm) else None
                prepare_low(fed.a.shape[0], of_norm)
                prepare_matmul([each for each in PLANS[fed.plan].kernels() if each[0] >= least], given=True)
            count += 1
    return count


def _can_feed(giver: Any, fed: Fed) -> bool:
    if isinstance(giver, EarlySiluAndMul):
        return can_feed_silu(fed)
    return isinstance(giver, EarlyRMSNorm) and giver.weight.shape[0] == fed.a.shape[1] and can_feed_norm(fed)


def _descendant(layer: Any, name: str) -> Any:
    for part in name.split("."):
        layer = getattr(layer, part, None)
    return layer


def _is_ours(module: Any, columns: set[int], norms: bool) -> bool:
    if type(module) is SiluAndMul:
        return True
    if type(module) is RotaryEmbedding:
        return module.is_neox_style and module.rotary_dim == module.head_size
    if not norms or type(module) is not RMSNorm or not module.has_weight or module.variance_size_override is not None:
        return False
    return module.weight.shape[0] in columns and can_normalize(module.weight)
