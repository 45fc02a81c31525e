"""Adaptive Quantization Noise on the norms of a vLLM model.

The weights are kept in float32 from loading on: near 1, bf16 has steps of 2**-8 to 2**-7 and swallows most of a noise
below 4e-3. vLLM's rms_norm takes a float32 weight for bf16 activations (its C kernel declines and the native one runs).
It then skips a rounding of the normalized activations, which in eager mode costs agreement with the actor (mean
difference of log-probs 9.4e-4 instead of 6.1e-4, tests/bench/results/cpu). Rounding them first was tried: bit for bit
the layer without noise, but then sigma 5e-4 changes nothing at all, since every product rounds back.
Weights are changed in place, so that captured CUDA graphs and compiled code see it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from verl_qerl.algos.aqn import AQNConfig, draw_noise, noisy_weight
from verl_qerl.algos.uaq import norm_scale
from verl_qerl.formats.manifest import checksum


class NormNoise:
    """The noisy norms of one worker. Create it after loading and before anything is compiled or captured.

    Args:
        model: The vLLM model; weights of the targets become float32.
        config: Targets, mode and seed.
        uaq_scale: s of UAQ. Additive noise on the norms that UAQ multiplies is multiplied too, so that sigma keeps its
            meaning: (s w + s Z) with the linears divided by s is the model with w + Z.

    Raises:
        ValueError: A target names no norm of this model.
    """

    def __init__(self, model: torch.nn.Module, config: AQNConfig, uaq_scale: float = 1.0) -> None:
        self._config = config
        self._norms = find_norms(model, config.targets, "Name them with `+aqn.targets=[...]`.")
        additive = config.mode == "additive"
        self._units = {name: norm_scale(name, uaq_scale) if additive else 1.0 for name in self._norms}
        self._sigma, self._step = 0.0, 0
        self.recapture()

    @property
    def names(self) -> list[str]:
        """Module names, in the order of the model."""
        return list(self._norms)

    @property
    def clean(self) -> Mapping[str, torch.Tensor]:
        """Name -> weight [K] float32 without noise."""
        return self._clean

    def recapture(self) -> None:
        """Take the present weights as the clean ones, after a full weight sync; the noise goes back on top of them."""
        self._clean = {name: norm.weight.data.clone() for name, norm in self._norms.items()}
        self.apply(self._sigma, self._step)

    def replace_clean(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take other weights as the clean ones; the noise that is on goes on top of them.

        Args:
            weights: name -> [K] float32; names that get no noise are passed over.
        """
        for name in weights.keys() & self._clean.keys():
            self._clean[name].copy_(weights[name])
        self.apply(self._sigma, self._step)

    @torch.no_grad()
    def apply(self, sigma: float, step: int) -> int:
        """Set every norm to its clean weight plus noise; sigma 0 restores the clean weights bit for bit.

        Returns:
            Number of norms set.
        """
        self._sigma, self._step = sigma, step
        for name, norm in self._norms.items():
            clean = self._clean[name]
            noise = draw_noise(self._config.seed, step, name, clean.numel()).to(clean.device) if sigma else clean
            norm.weight.data.copy_(noisy_weight(clean, noise, sigma * self._units[name], self._config.mode))
        return len(self._norms)

    def checksum(self) -> int:
        """Of the float32 weights as they are set: equal on every rank and replica, which hold norms whole."""
        return int(checksum(torch.cat([norm.weight.data.reshape(-1) for norm in self._norms.values()])))


def find_norms(model: torch.nn.Module, targets: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """The norms of a vLLM model by name, their weights float32 from now on.

    Args:
        model: Before anything is compiled or captured.
        targets: Last parts of the names.
        remedy: End of the error.

    Raises:
        ValueError: A target names no norm of this model.
    """
    found, present = {}, set()
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if "norm" in leaf and isinstance(weight, torch.nn.Parameter) and weight.ndim == 1:
            present.add(leaf)
            if leaf in targets:
                found[name] = module
    lost = sorted(set(targets) - {name.rpartition(".")[2] for name in found})
    if lost:
        raise ValueError(f"{type(model).__name__} has no norms named {lost}. Its norms are {sorted(present)}. {remedy}")
    for norm in found.values():
        norm.weight.data = norm.weight.data.float()
    return found
