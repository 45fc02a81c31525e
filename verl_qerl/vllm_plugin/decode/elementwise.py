"""vLLM's norms, activations and rotary embeddings beside our linears, on `kernels.rollout.elementwise`.

These kernels let the next linear load its weights while they run (programmatic dependent launch), which the code that
torch compiles of vLLM's own does not.
"""

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

from verl_qerl import upstream
from verl_qerl.kernels.rollout import elementwise, rotation
from verl_qerl.kernels.rollout.elementwise import add_rms_norm, can_normalize, can_silu, rms_norm, silu_mul
from verl_qerl.kernels.rollout.rotation import can_normalize_heads, can_rotate, norm_rotate, rotate
from verl_qerl.upstream import HostChange
from verl_qerl.vllm_plugin import hosts


class PDLRMSNorm(RMSNorm):
    """Of rows of a model's hidden size, with a weight."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As vLLM's `forward_native`: the normalized x, or that of the sum and the sum."""
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class PDLSiluAndMul(SiluAndMul):
    """SiLU of the left half of a row, times its right half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As vLLM's `forward_native`; x [..., 2 I], result [..., I]."""
        return silu_mul(x) if can_silu(x) else self.forward_native(x)


class PDLRotaryEmbedding(RotaryEmbedding):
    """Of whole heads, their halves turned together."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As vLLM's `forward_native`; query and key [T, heads * head_size]."""
        table = self._match_cos_sin_cache_dtype(query)
        if key is None or not can_rotate(query, key, positions, table, self.head_size):
            return self.forward_native(positions, query, key)
        return rotate(query, key, positions, table, self.head_size)


class _PDLHeads:
    """Attention of Qwen3, with the norms of heads and their rotation as one launch."""

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """As vLLM's (model_executor/models/qwen3.py, qwen3_moe.py)."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        table, epsilon = self.rotary_emb._match_cos_sin_cache_dtype(q), self.q_norm.variance_epsilon
        if can_rotate(q, k, positions, table, self.head_dim):
            weights = (self.q_norm.weight.data, self.k_norm.weight.data)
            q, k = norm_rotate(q, k, *weights, epsilon, positions, table, self.head_dim)
        else:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class PDLQwen3Attention(_PDLHeads, Qwen3Attention):
    """Of a dense model."""


class PDLQwen3MoeAttention(_PDLHeads, Qwen3MoeAttention):
    """Of a mixture of experts."""


_PDL: dict[type, tuple[HostChange, type]] = {
    RMSNorm: (hosts.RMS_NORM, PDLRMSNorm),
    SiluAndMul: (hosts.SILU_AND_MUL, PDLSiluAndMul),
    RotaryEmbedding: (hosts.ROTARY, PDLRotaryEmbedding),
    Qwen3Attention: (hosts.QWEN3_ATTENTION, PDLQwen3Attention),
    Qwen3MoeAttention: (hosts.QWEN3_MOE_ATTENTION, PDLQwen3MoeAttention),
}


def use_programmatic_launch(model: torch.nn.Module, columns: set[int], left: torch.dtype | None = None) -> int:
    """Replace norms, activations and rotary positions by those that let the next kernel start early.

    Call it after loading and before anything is compiled. Modules that compute something else than vLLM's own stay as
    they are, and so do norms of other rows; those of heads are part of their attention.

    Args:
        columns: Of `linear.repacked_in_features`; where there are none, nothing is replaced.
        left: Norms of rows with a weight of this dtype stay as they are.

    Returns:
        Number of modules replaced.
    """
    found: dict[Any, type] = {
        module: kind for module in model.modules() if columns and (kind := _kind(module, columns, left))
    }
    for module, kind in found.items():
        change, ours = _PDL[kind]
        upstream.swap_class(change, module, ours)
    if found and next(model.parameters()).is_cuda:
        weights = [module.weight for module in found if isinstance(module, RMSNorm)]
        elementwise.prepare({(weight.shape[0], weight.dtype) for weight in weights})
        of_heads = (module for module in found if isinstance(module, PDLQwen3Attention | PDLQwen3MoeAttention))
        rotation.prepare({module.q_norm.weight.dtype for module in of_heads})
    return len(found)


def _kind(module: Any, columns: set[int], left: torch.dtype | None) -> type | None:
    """Key of _PDL of a module that is replaced."""
    kind = type(module)
    if kind is SiluAndMul:
        return kind
    if isinstance(module, RotaryEmbedding):
        # Of other frequencies alone, as Llama 3 and YaRN have them.
        computes = ("forward", "forward_native", "forward_cuda")
        same = all(getattr(kind, name) is getattr(RotaryEmbedding, name) for name in computes)
        whole = module.is_neox_style and module.rotary_dim == module.head_size
        return RotaryEmbedding if same and whole else None
    if kind in (Qwen3Attention, Qwen3MoeAttention):
        return kind if _normalizes_heads(module) else None
    if _is_plain(module) and module.weight.shape[0] in columns and module.weight.dtype != left:
        return kind if can_normalize(module.weight) else None
    return None


def _is_plain(norm: Any) -> bool:
    return type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None


def _normalizes_heads(attention: Any) -> bool:
    q, k = attention.q_norm, attention.k_norm
    plain = _is_plain(q) and _is_plain(k) and q.variance_epsilon == k.variance_epsilon
    rotated = _kind(attention.rotary_emb, set(), None) or type(attention.rotary_emb) is PDLRotaryEmbedding
    return bool(plain and rotated and can_normalize_heads(q.weight, k.weight))
