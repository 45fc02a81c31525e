"""vLLM's norms, activations and rotary embeddings on our kernels, for models whose linears are ours.

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
from verl_qerl.kernels.rollout.rotation import can_normalize_heads, can_rotate, rotate
from verl_qerl.upstream import HostChange
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.noise.row_norms import is_plain


class PDLRMSNorm(RMSNorm):
    """A norm with a weight over rows of the model's hidden size."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalized x; with a residual, the normalized sum and the sum."""
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class PDLSiluAndMul(SiluAndMul):
    """SiLU of the left half of a row, times its right half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 I] -> [..., I]."""
        return silu_mul(x) if can_silu(x) else self.forward_native(x)


class PDLRotaryEmbedding(RotaryEmbedding):
    """The rotation of whole heads whose halves are turned together (NeoX style)."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key, [T, heads * head_size] each."""
        table = self._match_cos_sin_cache_dtype(query)
        if key is None or not can_rotate(query, key, positions, table, self.head_size):
            return self.forward_native(positions, query, key)
        return rotate(query, key, positions, table, self.head_size)


class _PDLHeads:
    """Attention of Qwen3 in which the norms of the heads and their rotation are one launch."""

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The steps of vLLM's forward (model_executor/models/qwen3.py, qwen3_moe.py)."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        table, epsilon = self.rotary_emb._match_cos_sin_cache_dtype(q), self.q_norm.variance_epsilon
        if can_rotate(q, k, positions, table, self.head_dim):
            weights = (self.q_norm.weight.data, self.k_norm.weight.data)
            q, k = rotate(q, k, positions, table, self.head_dim, *weights, epsilon)
        else:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class PDLQwen3Attention(_PDLHeads, Qwen3Attention):
    """Attention of a dense Qwen3."""


class PDLQwen3MoeAttention(_PDLHeads, Qwen3MoeAttention):
    """Attention of a Qwen3 with experts."""


_PDL: dict[type, tuple[HostChange, type]] = {
    RMSNorm: (hosts.RMS_NORM, PDLRMSNorm),
    SiluAndMul: (hosts.SILU_AND_MUL, PDLSiluAndMul),
    RotaryEmbedding: (hosts.ROTARY, PDLRotaryEmbedding),
    Qwen3Attention: (hosts.QWEN3_ATTENTION, PDLQwen3Attention),
    Qwen3MoeAttention: (hosts.QWEN3_MOE_ATTENTION, PDLQwen3MoeAttention),
}


def use_programmatic_launch(model: torch.nn.Module, columns: set[int], left: torch.dtype | None = None) -> None:
    """Replace norms, activations and rotary embeddings by kernels with programmatic dependent launch.

    Call it after loading and before anything is compiled. Modules that compute something else than vLLM's own stay
    vLLM's, and so do norms over other rows. The norms of heads are part of their attention.

    Args:
        columns: in_features of our linears, from `linear.repacked_in_features`.
        left: Norms whose weight has this dtype stay vLLM's.
    """
    found: dict[Any, type] = {module: kind for module in model.modules() if (kind := _kind(module, columns, left))}
    for module, kind in found.items():
        change, ours = _PDL[kind]
        upstream.swap_class(change, module, ours)
    if found and next(model.parameters()).is_cuda:
        weights = [module.weight for module in found if isinstance(module, RMSNorm)]
        elementwise.prepare({(weight.shape[0], weight.dtype) for weight in weights})
        of_heads = (module for module in found if isinstance(module, PDLQwen3Attention | PDLQwen3MoeAttention))
        rotation.prepare({module.q_norm.weight.dtype for module in of_heads})


def _kind(module: Any, columns: set[int], left: torch.dtype | None) -> type | None:
    """The key of _PDL for a module that is to be replaced, else None."""
    kind = type(module)
    if kind is SiluAndMul:
        return kind
    if isinstance(module, RotaryEmbedding):
        # Subclasses that only change the frequencies (Llama 3, YaRN) compute the same.
        computes = ("forward", "forward_native", "forward_cuda")
        same = all(getattr(kind, name) is getattr(RotaryEmbedding, name) for name in computes)
        whole = module.is_neox_style and module.rotary_dim == module.head_size
        # Of another dtype (gpt-oss) it is cast in each pass, and ours reads it before earlier kernels have ended.
        return RotaryEmbedding if same and whole and module.cos_sin_cache.dtype == torch.bfloat16 else None
    if kind in (Qwen3Attention, Qwen3MoeAttention):
        return kind if _normalizes_heads(module) else None
    if is_plain(module) and module.weight.shape[0] in columns and module.weight.dtype != left:
        return kind if can_normalize(module.weight) else None
    return None


def _normalizes_heads(attention: Any) -> bool:
    q, k = attention.q_norm, attention.k_norm
    plain = is_plain(q) and is_plain(k) and q.variance_epsilon == k.variance_epsilon
    rotated = _kind(attention.rotary_emb, set(), None) or type(attention.rotary_emb) is PDLRotaryEmbedding
    return bool(plain and rotated and can_normalize_heads(q.weight, k.weight))
