"""UAQ on the actor's side: a loaded model is scaled once, and its checkpoints say so."""

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from verl_qerl.algos.uaq import RECORD, fold_, read_record, scaled_parameters
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.actor.resume import read_on_first_rank


@torch.no_grad()
def fold_model(model: nn.Module, scale: float) -> int:
    """Scale weights of a model that has just been loaded, in place and so that its function stays; return their number.

    Args:
        model: A model of transformers; on ranks that get their weights from another it may be on the meta device.

    Raises:
        ValueError: The model's layers or norms are not of the form that UAQ knows.
    """
    parameters = dict(model.named_parameters())
    roles = scaled_parameters(parameters)
    for name, role in roles.items():
        weight = parameters[name].data
        if role == "linear":
            fold_(role, weight, scale)
            continue
        norm = model.get_submodule(name.removesuffix(".weight"))
        before = _answer(norm)
        fold_(role, weight, scale)
        if not torch.allclose(_answer(norm), before * scale, rtol=1e-2, atol=0):
            raise ValueError(
                f"{name} of {type(norm).__name__} is no plain factor: the norm's output does not grow by"
                f" uaq.scale={scale:g} with it. Accepted are norms that multiply by their weight. Leave out"
                " `+uaq.enabled=true`."
            )
    return len(roles)


def _answer(norm: nn.Module) -> torch.Tensor:
    """What a norm makes of some input, float32; empty where it holds no values."""
    weight: Any = norm.weight
    if weight.is_meta:
        return torch.empty(0)
    given = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype, device=weight.device)
    return norm(given[None])[0].float()


def check_scale(folder: Path, scale: float | None) -> None:
    """Require that a checkpoint's weights were scaled as this run's are, on every rank alike.

    Args:
        folder: The checkpoint's folder, read by rank 0.
    """
    saved = read_on_first_rank(lambda: (read_record(folder) or {}).get("scale"))
    if saved != scale:
        was, now = ("not scaled by UAQ" if s is None else f"scaled by uaq.scale={s:g}" for s in (saved, scale))
        remedy = "Leave out +uaq.*" if saved is None else f"Set +uaq.enabled=true +uaq.scale={saved:g}"
        raise CheckpointFormatError(
            f"the weights of the checkpoint are {was}, those of this run {now}: {folder / RECORD}. The same is"
            f" accepted. {remedy}, or train from an export of it."
        )
