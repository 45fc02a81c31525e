"""Adaptive Quantization Noise on the norms of a vLLM model.

The weights are kept in float32 from loading on: near 1, bf16 has steps of 2**-8 to 2**-7 and swallows most of a noise
below 4e-3. vLLM's rms_norm takes a float32 weight for bf16 activations (its C kernel declines and the native one runs).
It then skips a rounding of the normalized activations, which in eager mode costs agreement with the actor (mean
difference of log-probs 9.4e-4 instead of 6.1e-4: tests/bench/results/cpu/mismatch.json, in the history at f54003f).
Rounding them first was tried: bit for bit the layer without noise, but then sigma 5e-4 changes nothing at all, since
every product rounds back.
Weights are changed in place, so that captured CUDA graphs and compiled code see it.

With one draw for the batch the weight gets noise; with several the rows of a table do, and the weight stays clean.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from verl_qerl.algos.aqn import AQNConfig, draw_noise, noisy_weight, norm_rms
from verl_qerl.algos.noise_places import check_places, reaches_router
from verl_qerl.algos.uaq import norm_scale
from verl_qerl.checkpoints.manifest import checksum
from verl_qerl.vllm_plugin.log import say_once

# Norms by name -> [draws, K] float32 of each, in which its noisy weights are kept.
GiveTables = Callable[[Mapping[str, Any]], dict[str, torch.Tensor]]


class NormNoise:
    """The noisy norms of one worker. Create it after loading and before anything is compiled or captured.

    Args:
        model: The vLLM model; weights of the targets become float32.
        uaq_scale: s of UAQ. Additive noise on the norms that UAQ multiplies is multiplied too, so that sigma keeps its
            meaning: (s w + s Z) with the linears divided by s is the model with w + Z. The other modes are in units of
            the weight, which has s in it.
        give_tables: Gives rows for several draws, the first of which is what a single draw would be; None for a single
            draw.

    Attributes:
        clean: Module name -> weight [K] float32 without noise, in the order of the model.

    Raises:
        ValueError: A target names no norm of this model, or one that multiplies by 1 + w where the mode's unit is w. Or
            as `give_tables` raises.
    """

    def __init__(
        self, model: torch.nn.Module, config: AQNConfig, uaq_scale: float = 1.0, give_tables: GiveTables | None = None
    ) -> None:
        self._config = config
        self._norms = find_norms(model, config.norms, "Name them with `+aqn.targets=[...]`.")
        if config.mode != "additive":
            _refuse_offsets(self._norms, config.mode)
        self._uaq = {name: norm_scale(name, uaq_scale) for name in self._norms}
        self._sigma, self._step = 0.0, 0
        self._tables = give_tables(self._norms) if give_tables is not None else {}
        self.recapture()

    def recapture(self, dtype: torch.dtype = torch.float32) -> None:
        """Take the present weights as the clean ones, after a full weight sync; the noise goes back on top of them.

        Args:
            dtype: What they are rounded to, as norms without noise would be: verl sends float32 where all is trained.
        """
        for norm in self._norms.values():
            norm.weight.data.copy_(norm.weight.data.to(dtype))
        self.clean = {name: norm.weight.data.clone() for name, norm in self._norms.items()}
        self.apply(self._sigma, self._step)

    def replace_clean(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take other weights as the clean ones; the noise that is on goes on top of them.

        Args:
            weights: name -> [K] float32; names that get no noise are passed over.
        """
        for name in weights.keys() & self.clean.keys():
            self.clean[name].copy_(weights[name])
        self.apply(self._sigma, self._step)

    @torch.no_grad()
    def apply(self, sigma: float, step: int) -> int:
        """Set every norm to its clean weight plus noise; sigma 0 restores the clean weights bit for bit.

        Returns:
            Number of norms set.

        Raises:
            ValueError: The mode is relative and a norm has nothing but zeros.
        """
        self._sigma, self._step = sigma, step
        if sigma and self._config.mode == "relative":
            self.sizes()  # refuses zeros
        for name, noisy in self._noisy().items():
            clean = self.clean[name]
            drawn = draw_noise(self._config.seed, step, name, noisy.numel()) if sigma else clean
            noise = drawn.to(clean.device).view(-1, clean.numel())
            unit = self._uaq[name] if self._config.mode == "additive" else 1.0
            noisy.copy_(noisy_weight(clean, noise, sigma * unit, self._config.mode))
        return len(self._norms)

    def sizes(self) -> dict[str, float]:
        """Name -> root mean square of the clean weight, as it is without UAQ.

        Raises:
            ValueError: The mode is relative and a norm has nothing but zeros.
        """
        rms = torch.stack([norm_rms(clean) for clean in self.clean.values()]).tolist()
        if self._config.mode == "relative" and not all(rms):
            zeros = [name for name, size in zip(self.clean, rms, strict=True) if not size]
            raise ValueError(
                f"aqn.mode=relative has no unit where a norm's weights are all zero: {zeros[0]}"
                f" ({len(zeros)} of {len(rms)} norms). Accepted are norms with weights. Set `+aqn.mode=additive`."
            )
        return {name: size / self._uaq[name] for name, size in zip(self.clean, rms, strict=True)}

    def num_noisy(self) -> int:
        """Number of norms whose weight differs from the clean one; of several draws, all have to."""
        return sum(bool((rows != self.clean[name]).any(1).all()) for name, rows in self._noisy().items())

    def checksum(self) -> int:
        """Checksum of the float32 weights as they are set; equal on all ranks and replicas, which hold norms whole."""
        return int(checksum(torch.cat([rows.reshape(-1) for rows in self._noisy().values()])))

    def _noisy(self) -> Mapping[str, torch.Tensor]:
        """Name -> [draws, K] float32 that noise is put into: rows of a table, or the weight."""
        return self._tables or {name: norm.weight.data[None] for name, norm in self._norms.items()}


def check_model(vllm_config: Any, config: AQNConfig) -> None:
    """Call `check_places`, and say where noise reaches more than attention and MLP."""
    family = vllm_config.model_config.hf_text_config.model_type
    check_places(family, config.targets)
    if reaches_router(family, config.norms):
        say_once(f"noise on post_attention_layernorm also reaches the routers of {family}, which read that norm.")


def _refuse_offsets(norms: Mapping[str, torch.nn.Module], mode: str) -> None:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    for name, norm in norms.items():
        if isinstance(norm, GemmaRMSNorm):
            raise ValueError(
                f"aqn.mode={mode} takes a norm's weight for its unit, and {name} multiplies by 1 + weight."
                " Accepted is additive. Set `+aqn.mode=additive`."
            )


def find_norms(model: torch.nn.Module, targets: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """The norms of a vLLM model by name, their weights float32 from now on.

    Args:
        model: Before anything is compiled or captured.

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
