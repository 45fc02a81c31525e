"""Attention over packed sequences of any lengths, for models of transformers, without flash-attn.

Registered under NAME: `attn_implementation=verl_qerl_varlen`. On a GPU it is FlashAttention as torch ships it
(torch.nn.attention.varlen), elsewhere and in float32 one scaled_dot_product_attention a sequence. As with
flash_attention_2, sequences are told apart by their positions, which start anew with each, or by a mask of padding.
"""

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "verl_qerl_varlen"
_OPTION = "model.override_config.attn_implementation"
_LARGEST_HEAD = 256  # of FlashAttention's kernels, whose heads are multiples of 8
# torch 2.11 takes fewer heads of keys than of queries as they are; later versions want to be told.
_GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Packing:
    """Which tokens belong together.

    Attributes:
        lengths: Tokens of each sequence, in their order.
        cu_seqlens: [N + 1] int32: where each sequence starts, and the end of the last.
        kept: [T] int64, places of the tokens among all of [B, S]; None where none is padding.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    kept: torch.Tensor | None = None


def register() -> None:
    """Make NAME known to transformers; a second call changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, varlen_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_mask)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that asks for NAME and has parts that it cannot compute; any other passes."""
    config = model.config
    if config._attn_implementation != NAME:
        return
    found = {
        "no attention that can be exchanged": not model._supports_attention_backend,
        "capped scores (attn_logit_softcapping)": getattr(config, "attn_logit_softcapping", None) is not None,
        "attention in chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None) is not None,
        "attention to later tokens (is_causal=False)": not getattr(config, "is_causal", True),
    }
    _refuse_parts(model, found)


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence, in transformers' attention interface.

    Args:
        query: [B, H, S, D].
        key: [B, G, S, D], G dividing H.
        value: Shape of key.
        attention_mask: [B, S] bool of the tokens that are no padding, each row one sequence; None: there is no padding.
        dropout: 0.
        scaling: Factor of the scores; None: D ** -0.5.
        sliding_window: Tokens that each attends to, itself among them; None: all before it.
        is_causal: Not False.
        position_ids: [B, S] or [1, S]; where they do not go on by 1, a sequence starts. Not read beside a mask.
        more: Not read, but for parts of attention that are not supported.

    Returns:
        [B, S, H, D] in query's dtype, or in autocast's where query is float32; zeros at padding. No scores.

    Raises:
        ValueError: The layer asks for something else.
    """
    mask, sizes = attention_mask, {query.shape[-1], value.shape[-1]}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    found = {
        "attention to later tokens (is_causal=False)": not causal,
        f"dropout={dropout} in its attention": dropout != 0,
        "capped scores (softcap)": more.get("softcap") is not None,
        "attention sinks (s_aux)": more.get("s_aux") is not None,
        f"a mask of {0 if mask is None else mask.ndim} dimensions": mask is not None and mask.ndim != 2,
        "keys of earlier passes (use_cache=True)": key.shape[2] != query.shape[2],
        f"heads of {sorted(sizes)} elements": len(sizes) > 1 or max(sizes) > _LARGEST_HEAD or max(sizes) % 8 != 0,
        "no positions for its attention": mask is None and (position_ids is None or position_ids.ndim != 2),
    }
    _refuse_parts(module, found)
    device = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(device):
        query = query.to(torch.get_autocast_dtype(device))
    batch, heads, length, head_size = query.shape
    packing = _packing(mask, position_ids, batch, length)
    rows: Any = [x.to(query.dtype).transpose(1, 2).reshape(batch * length, -1, head_size) for x in (query, key, value)]
    if packing.kept is not None:
        rows = [x.index_select(0, packing.kept) for x in rows]
    out = packed_attention(rows[0], rows[1], rows[2], packing, scaling, sliding_window)
    if packing.kept is not None:
        out = out.new_zeros(batch * length, heads, head_size).index_copy(0, packing.kept, out)
    return out.view(batch, length, heads, head_size), None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """[T, H, D] and twice [T, G, D] -> [T, H, D]: each token attends to the last `window` of its sequence up to it."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        longest = max(packing.lengths)
        left = -1 if window is None or window >= longest else window - 1
        bounds = (packing.cu_seqlens, packing.cu_seqlens, longest, longest)
        found: Any = varlen_attn(query, key, value, *bounds, scale=scaling, window_size=(left, 0), **_GROUPED)
        return found
    outputs = []
    for q, k, v in zip(*(x.split(packing.lengths) for x in (query, key, value)), strict=True):
        mask = None
        if window is not None and window < len(q):
            mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril().triu(1 - window)
        parts = (x.transpose(0, 1)[None] for x in (q, k, v))
        options: Any = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": True}
        outputs.append(F.scaled_dot_product_attention(*parts, **options)[0].transpose(0, 1))
    return torch.cat(outputs)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = None,
    **more: Any,
) -> torch.Tensor | None:
    """What `varlen_attention` gets as its mask, in transformers' mask interface; made once a forward pass.

    Args:
        mask_function: (row, head, q, k) -> whether q attends to k.
        attention_mask: [B, S] bool of the tokens that are no padding.
        use_vmap: Whether a mask of the model's own is in `mask_function`.

    Returns:
        [B, S] bool of the tokens that are no padding, or None where all are.

    Raises:
        ValueError: Tokens attend to later ones, or the window is another one than that of the layers.
    """
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise _unsupported(f"{config.model_type} has attention in chunks of {local_size}")
    first, each = torch.zeros((), dtype=torch.long, device=device), torch.arange(q_length - 1, device=device)
    if use_vmap or torch.as_tensor(mask_function(first, first, each, each + 1)).any():
        raise _unsupported(f"{config.model_type} has a mask of its own, in which tokens may attend to later ones")
    return flash_attention_mask(batch_size, q_length, kv_length, attention_mask=attention_mask)


# Of the pass that computes now: all layers, and their second forward in backward, are given the same tensor.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _packing(mask: torch.Tensor | None, position_ids: torch.Tensor | None, batch: int, length: int) -> Packing:
    """The sequences of a pass; the host waits for the GPU once a pass, when the first layer asks."""
    source: Any = position_ids if mask is None else mask
    # In inference mode a tensor does not tell whether it was changed, so every layer reads it.
    key = (object() if source.is_inference() else source._version, batch, length)
    known = _known.get(source)
    if known is None or known[0] != key:
        found = _from_positions(source.expand(batch, length)) if mask is None else _from_mask(source)
        _known[source] = known = (key, found)
    return known[1]


def _from_positions(position_ids: torch.Tensor) -> Packing:
    positions = position_ids.cpu()
    starts = torch.ones_like(positions, dtype=torch.bool)  # a sequence ends with its row
    starts[:, 1:] = positions.diff() != 1
    bounds = [*starts.view(-1).nonzero()[:, 0].tolist(), positions.numel()]
    return _packed(bounds, position_ids.device)


def _from_mask(mask: torch.Tensor) -> Packing:
    bounds = [0, *mask.sum(-1).cumsum(0).tolist()]
    starts = [at for at, after in pairwise(bounds) if at < after]
    return _packed([*starts, bounds[-1]], mask.device, kept=mask.reshape(-1).nonzero()[:, 0])


def _packed(bounds: list[int], device: torch.device, kept: torch.Tensor | None = None) -> Packing:
    lengths = tuple(after - at for at, after in pairwise(bounds))
    return Packing(lengths, torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True), kept)


def _refuse_parts(module: nn.Module, found: dict[str, bool]) -> None:
    """Refuse a model or a layer with one of these parts."""
    for part, present in found.items():
        if present:
            raise _unsupported(f"{type(module).__name__} has {part}")


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"{what}: {_OPTION}={NAME} cannot compute that. Accepted are causal attention, sliding windows, heads that are"
        f" multiples of 8 up to {_LARGEST_HEAD}, no dropout. Set ++actor_rollout_ref.{_OPTION}=eager, or to another one"
        " that the model supports."
    )
