"""Liger's kernels in the actor's passes over a packed base: `model.use_liger`.

They compute norms, rotary positions and SiLU in one launch each. A norm rounds where transformers' and vLLM's do,
before it multiplies by the weight (Liger's casting mode "llama"). Frozen weights of norms get no gradient.
"""

import importlib
import importlib.util
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_qerl.options.rules import MODEL

# Layers of these keep linears q, k, v and gate, up, down, which Liger calls as transformers does. Of a mixture of
# experts it replaces what holds the packed experts.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def check_liger(config: DictConfig, model_type: str | None) -> None:
    """Refuse on the driver what the workers could not do.

    Args:
        model_type: The model_type of model.path's config.json; None if it is not known here.

    Raises:
        ValueError: model.use_liger is true, and Liger is not installed, the run is on the CPU, or Liger's kernels do
            not fit the model.
    """
    if not OmegaConf.select(config, f"{MODEL}.use_liger"):
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError(
            "model.use_liger=True needs the package liger-kernel, which is not installed. Accepted is False without it."
            " Run `pip install liger-kernel`, or leave the option out."
        )
    if OmegaConf.select(config, "trainer.device") == "cpu":
        raise ValueError(
            "model.use_liger=True with trainer.device=cpu: Liger's kernels run on a GPU alone. Accepted is False there."
            " Leave it out."
        )
    if model_type is not None:
        _check_family(model_type)


def apply_liger(module: Any) -> None:
    """Put norms, SiLU and rotary positions of a model on Liger's kernels.

    Norms and MLPs of this model change. The rotary function is that of all models of the family in this process, as
    where verl applies Liger itself.

    Args:
        module: A causal language model of transformers, before PEFT and FSDP2.

    Raises:
        ValueError: Liger's kernels do not fit it.
    """
    _check_family(module.config.model_type)
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patch._apply_liger_kernel_to_instance(model=module, fused_linear_cross_entropy=False, swiglu=True)


def _check_family(model_type: str) -> None:
    if model_type not in _FAMILIES:
        raise ValueError(
            f"model.use_liger=True on a packed base of model type {model_type}. Accepted are {', '.join(_FAMILIES)}."
            " Leave it out."
        )
