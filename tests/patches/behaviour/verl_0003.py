"""An NVFP4 checkpoint is served without QAT unless QAT is on."""

from types import SimpleNamespace

import named_vllm  # noqa: F401  # before verl
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

vllm_config = SimpleNamespace(quant_config=SimpleNamespace(quant_format="nvfp4-pack-quantized"))
try:
    worker = vLLMColocateWorkerExtension(vllm_config=vllm_config)
except (AttributeError, ImportError) as error:  # what the QAT patches raise on a vLLM they were not written for
    raise AssertionError(f"the worker of a frozen NVFP4 base applied the QAT patches: {error}") from error
assert worker._is_qat_model is False, "a frozen NVFP4 base was taken for a QAT model"
