"""Methods that vLLM's workers gain: `collective_rpc("qerl_set_noise", ...)`.

vLLM appends an extension to the bases of its worker class, so that nothing here can override a method; what has to run
after loading is hung on the instance.
"""

from typing import Any

import torch

from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.vllm_plugin.noise import NormNoise

# Key of `additional_config`, vLLM's door for options of a plugin.
OPTIONS = "verl_qerl"


class NoiseWorkerExtension:
    """Adds noise to a worker whose `additional_config.verl_qerl.aqn` holds the options of AQNConfig."""

    _qerl_noise: NormNoise | None

    def __new__(cls, **kwargs: Any) -> Any:
        """Create the worker; `load_model` will prepare the norms."""
        instance = super().__new__(cls)
        prepare_noise(instance, kwargs.get("vllm_config"))
        return instance

    def qerl_set_noise(self, sigma: float, step: int) -> int:
        """Give every target norm fresh noise; `reset_prefix_cache` must follow.

        Args:
            sigma: Standard deviation, 0 to restore.
            step: Training step, part of the seed.

        Returns:
            Number of norms set.

        Raises:
            ValueError: The engine was started without noise.
        """
        if self._qerl_noise is None:
            raise ValueError(
                "this engine was started without noise. Options of AQN go into additional_config.verl_qerl.aqn."
                " Start it with `+aqn.enabled=true`."
            )
        return self._qerl_noise.apply(sigma, step)

    def qerl_norm_weights(self) -> dict[str, torch.Tensor]:
        """Name -> present float32 weight on the CPU, to look at."""
        norms = self._qerl_noise._norms if self._qerl_noise else {}
        return {name: norm.weight.detach().cpu().clone() for name, norm in norms.items()}


def prepare_noise(worker: Any, vllm_config: Any) -> None:
    """Have `worker.load_model` prepare the norms when `additional_config.verl_qerl.aqn` asks for noise.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    worker._qerl_noise = None
    options = (getattr(vllm_config, "additional_config", None) or {}).get(OPTIONS, {})
    config = AQNConfig.from_mapping(options.get("aqn"))
    if not config.enabled:
        return
    load_model = worker.load_model

    def load_then_prepare(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        # Before anything is compiled, and outside of the sleep-mode pool: a few hundred kB that stay readable while
        # the engine sleeps.
        worker._qerl_noise = NormNoise(worker.model_runner.get_model(), config)

    worker.load_model = load_then_prepare
