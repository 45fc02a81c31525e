"""Worker extension of bench_noise.py: the noise of an engine gets another mode."""

import dataclasses
from typing import Any

from verl_qerl.vllm_plugin import register
from verl_qerl.vllm_plugin.worker import RolloutWorkerExtension

register()  # workers are processes, which have nothing registered


class Noise(RolloutWorkerExtension):
    """Noise whose mode can be changed while there is a draw a batch: weights are all that it sets."""

    def bench_set_mode(self: Any, mode: str) -> None:
        """Restore the norms; noise to come has this mode."""
        noise = self._qerl_noise
        noise.apply(0.0, 0)
        config = dataclasses.replace(noise._config, mode=mode)
        self._qerl_noise = type(noise)(self.model_runner.get_model(), config)
