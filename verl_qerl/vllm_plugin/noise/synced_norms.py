"""Norms of a vLLM model that follow those of the actor, where it trains them beside its adapter.

A sync brings what was added to each weight, rounded to bf16 as FSDP2 rounds it for the actor's own passes. The weight
is set in place, float32 as for noise: captured CUDA graphs and compiled code see it, and small changes count.
"""

from collections.abc import Mapping

import torch

from verl_qerl.algos.trained_norms import NORMS, split_norms
from verl_qerl.vllm_plugin.adapter.buffers import Layout, num_elements, unflatten
from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise, find_norms


def split_shifts(layout: Layout, flat: torch.Tensor) -> tuple[Layout, torch.Tensor, dict[str, torch.Tensor]]:
    """(layout and tensor of the adapter alone, norm -> its shift as a part of `flat`).

    Raises:
        ValueError: A shift comes before a part of the adapter.
    """
    adapter, shifts = split_norms(unflatten(layout, flat))
    first = layout[: len(adapter)]
    if [name for name, _ in first] != list(adapter):
        raise ValueError(
            f"the shifts of norms do not come last: {len(shifts)} among {len(layout)} tensors. This is a defect of"
            " verl_qerl: report it."
        )
    return first, flat[: num_elements(first)], shifts


class SyncedNorms:
    """The trained norms of one worker. Create it after loading and before anything is compiled or captured.

    Args:
        model: The vLLM model, its norms those of the base; their weights become float32.
        noise: The noise of the engine, still at zero; None without noise.

    Raises:
        ValueError: The model lacks one of the norms.
    """

    def __init__(self, model: torch.nn.Module, noise: NormNoise | None = None) -> None:
        self._norms = find_norms(model, NORMS, "Leave out +qerl.base.train_norms.")
        self._base = {name: norm.weight.data.clone() for name, norm in self._norms.items()}
        self._noise = noise

    def check(self, shifts: Mapping[str, torch.Tensor]) -> None:
        """Require a shift of the right size for every norm and for nothing else."""
        found, held = ({name: one.numel() for name, one in part.items()} for part in (shifts, self._base))
        differing = sorted(name for name in found.keys() | held.keys() if found.get(name) != held.get(name))
        if differing:
            name = differing[0]
            raise ValueError(
                f"the actor trains other norms than the rollout has: {name!r} of {found.get(name)} numbers, here of"
                f" {held.get(name)} ({len(differing)} differ). Accepted are {' and '.join(NORMS)} of every layer."
                " Train the model that the rollout serves."
            )

    @torch.no_grad()
    def place(self, shifts: Mapping[str, torch.Tensor]) -> None:
        """Set every norm to the base's weight plus its shift; noise that is on goes on top.

        Args:
            shifts: name -> K numbers of any shape, for which `check`.
        """
        weights = self._weights(shifts)
        for name, weight in weights.items():
            self._norms[name].weight.data.copy_(weight)
        if self._noise is not None:
            self._noise.replace_clean(weights)

    @torch.no_grad()
    def require_placed(self, shifts: Mapping[str, torch.Tensor]) -> None:
        """Require that the norms hold, below the noise, what the sync brought."""
        below = {} if self._noise is None else self._noise.clean
        weights = self._weights(shifts)
        held = [below.get(name, self._norms[name].weight.data) for name in weights]
        if not torch.equal(torch.cat(held), torch.cat(list(weights.values()))):
            raise ValueError(
                "the rollout does not hold the norms that came: their weights are others. Without them the rollout"
                " samples from an older policy. This is a defect of verl_qerl: report it."
            )

    def _weights(self, shifts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: base + shifts[name].reshape(-1).float() for name, base in self._base.items()}
