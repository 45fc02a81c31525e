"""A digest of packed weights, to show that actor and rollout hold the same bits."""

import hashlib
from collections.abc import Mapping

import torch

from verl_qerl.formats import PackedWeight


def weight_digest(weight: PackedWeight) -> str:
    """First 16 hex digits of the SHA-256 over `WeightFormat.digest_label` and the tensors, in their order."""
    digest = hashlib.sha256(weight.form.digest_label(weight.shape).encode())
    for tensor in weight.tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def model_digest(weights: Mapping[str, str | int]) -> str:
    """One digest of a model from its weights' digests or checksums by name, independent of order."""
    lines = "\n".join(f"{module} {digest}" for module, digest in sorted(weights.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def check_same_base(actor: Mapping[str, str], rollout: Mapping[str, str]) -> None:
    """Raise ValueError unless both sides, module -> `weight_digest`, hold the same packed weights."""
    if not actor:
        raise ValueError(
            "the actor holds no packed weights. A run with `+rollout=...` and an adapter needs some. Check model.path."
        )
    differing = differing_weights(actor, rollout)
    if differing:
        name = differing[0]
        raise ValueError(
            f"two processes hold different base weights: {len(differing)} of {len(actor.keys() | rollout.keys())} "
            f"differ, first {name!r} ({actor.get(name)}, {rollout.get(name)}). Identical packed weights "
            "are required. Load both from the same model.path with the same quantization options."
        )


def differing_weights(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Modules, sorted, whose weight_digest differs or which one side lacks."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
