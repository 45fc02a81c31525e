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


class EarlyRMSNorm(RMSNorm):
    """Of rows of a model's hidden size, with a weight."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As vLLM's `forward_native`: the normalized x, or that of the sum and the sum."""
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class EarlySiluAndMul(SiluAndMul):
    """SiLU of the left half of a row, times its right half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As vLLM's `forward_native`; x [..., 2 I], result [..., I]."""
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


def _is_ours(module: Any, columns: set[int], norms: bool) -> bool:
    if type(module) is SiluAndMul:
        return True
    if type(module) is RotaryEmbedding:
        return module.is_neox_style and module.rotary_dim == module.head_size
    if not norms or type(module) is not RMSNorm or not module.has_weight or module.variance_size_override is not None:
        return False
    return module.weight.shape[0] in columns and can_normalize(module.weight)
