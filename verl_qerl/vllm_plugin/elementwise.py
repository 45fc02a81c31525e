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
from verl_qerl.kernels.elementwise_low import MAX_COLUMNS, can_make_low
from verl_qerl.kernels.elementwise_low import prepare as prepare_low
from verl_qerl.kernels.tiled_matmul import prepare as prepare_matmul
from verl_qerl.vllm_plugin.low_ops import (
    Fed,
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
    fed: list[tuple[Any, Fed, str]] = []
    for layer in model.modules():
        for giver_name, taker_name in _FEEDS:
            giver, taker = (_descendant(layer, name) for name in (giver_name, taker_name))
            linear = fed_linear(taker, least)
            if linear is not None and _can_feed(giver, linear):
                giver.qerl_fed = linear
                fed.append((giver, linear, taker.base_layer.qerl_plan))
    if fed and fed[0][1].a.is_cuda:
        norms = {(len(of.a), of.a.shape[1], giver.weight.dtype) for giver, of, _ in fed if isinstance(giver, RMSNorm)}
        prepare_low(norms, {len(of.a) for giver, of, _ in fed if isinstance(giver, SiluAndMul)})
        launches = {each for plan in {plan for *_, plan in fed} for each in PLANS[plan].kernels()}
        prepare_matmul([(tokens, launch) for tokens, launch in launches if tokens >= least], given=True)
    return len(fed)


def _can_feed(giver: Any, fed: Fed) -> bool:
    columns, K = fed.a.shape
    fits_norm = isinstance(giver, EarlyRMSNorm) and giver.weight.shape[0] == K <= MAX_COLUMNS
    return can_make_low(K, columns) and (fits_norm or isinstance(giver, EarlySiluAndMul))


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
