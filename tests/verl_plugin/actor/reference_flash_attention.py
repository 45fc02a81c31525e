"""Exact attention with flash-attn's interface, for machines without it: transformers and verl run as they do with it.

Sequence parallelism of verl acts in what transformers calls flash attention, and nowhere else.
"""

import torch
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "flash_attention_reference"


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """q [B, S, H, D], k and v [B, S, G, D], heads in groups of H / G -> [B, S, H, D]; in float32, rounded once."""
    assert dropout_p == 0
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q.float(), k.float())
    scores *= q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf")
        )
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.float()).to(q.dtype)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """As flash_attn_func, of sequences behind each other: q [T, H, D], sequence i from cu_seqlens[i] on."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff()
    assert max_seqlen_q == max_seqlen_k == lengths.max()
    assert lengths.sum() == len(q) == len(k) == len(v)
    parts = zip(*(x[None].split(lengths.tolist(), dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*part, dropout_p, softmax_scale, causal) for part in parts], dim=1)[0]


def install():
    """Have transformers find it under NAME, as it finds a kernel of the hub that it has loaded."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, flash_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    flash._loaded_implementation = NAME
    flash._flash_fn, flash._flash_varlen_fn = flash_attn_func, flash_attn_varlen_func
    flash._pad_fn, flash._unpad_fn = flash._pad_input, flash._unpad_input
    flash._process_flash_kwargs_fn = flash._lazy_define_process_function(flash_attn_varlen_func)
