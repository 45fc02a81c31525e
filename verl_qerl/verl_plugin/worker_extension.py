"""The class vLLM's workers inherit from: verl's own weight sync, our noise, and the digest check."""

import copy
from typing import Any, cast

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_qerl import vllm_plugin
from verl_qerl.nvfp4.digest import check_same_base
from verl_qerl.verl_plugin.config import DIGESTS
from verl_qerl.vllm_plugin.loader import base_digests
from verl_qerl.vllm_plugin.worker import NoiseWorkerExtension, prepare_noise


class WorkerExtension(NoiseWorkerExtension, vLLMColocateWorkerExtension):
    """verl's extension for an NVFP4 base that is never overwritten.

    verl takes every NVFP4 checkpoint for quantization-aware training: it would patch vLLM (with patches that vLLM
    0.24 breaks) and, on an adapter sync, replace the base by uninitialized memory (patches/verl/0003).
    """

    model_runner: Any  # of vLLM's worker, whose base this becomes
    _is_qat_model: bool
    _is_modelopt_qat: bool
    _qerl_base_unchecked: bool

    def __new__(cls, **kwargs: Any) -> Any:
        """Create the worker with verl's QAT switched off."""
        vllm_config = kwargs.get("vllm_config")
        hidden = {**kwargs, "vllm_config": _without_nvfp4(vllm_config)}
        worker = vLLMColocateWorkerExtension.__new__(cls, **hidden)
        if worker._is_qat_model or worker._is_modelopt_qat:
            raise RuntimeError("verl's QAT is on in a worker of ours. This is a defect of verl_qerl: report it.")
        load_config = getattr(vllm_config, "load_config", None)
        worker._qerl_base_unchecked = getattr(load_config, "load_format", None) == vllm_plugin.NAME
        prepare_noise(worker, vllm_config)
        return worker

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive an adapter or a whole model from the trainer, as verl does.

        Raises:
            ValueError: The actor's base weights are not those of this worker, or its first adapter comes without their
                digests: then the actor is not ours, and trains on a dense base.
        """
        expected = peft_config.pop(DIGESTS, None) if peft_config else None
        super().update_weights_from_ipc(
            peft_config=cast(dict, peft_config), base_sync_done=base_sync_done, use_shm=use_shm
        )
        # After the transfer: an error before it would leave the sender waiting for ever.
        adapter_only = peft_config is not None and base_sync_done
        if expected is not None or (adapter_only and self._qerl_base_unchecked):
            check_same_base(expected or {}, base_digests(self.model_runner.get_model()))
            self._qerl_base_unchecked = False
        if self._qerl_noise is not None and not adapter_only:
            self._qerl_noise.recapture()


def _without_nvfp4(vllm_config: Any) -> Any:
    quant_config = getattr(vllm_config, "quant_config", None)
    is_nvfp4 = getattr(quant_config, "quant_format", None) == "nvfp4-pack-quantized"
    if not is_nvfp4 and type(quant_config).__name__ != "ModelOptNvFp4Config":
        return vllm_config
    hidden = copy.copy(vllm_config)
    hidden.quant_config = None
    return hidden
