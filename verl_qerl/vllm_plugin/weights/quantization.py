"""The quantization methods `verl_qerl_<format>`: compressed-tensors' schemes with our choice of kernel.

NVFP4 on Hopper runs on `linear.W4A16Kernel`, on other GPUs on vLLM's own kernel (Marlin); MXFP4 on Marlin, always with
activations in bf16; INT8 and FP8 on vLLM's own kernels. A CPU has `reference_kernels`.
"""

from collections.abc import Iterable
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW4A4Mxfp4,
)
from vllm.platforms import current_platform

from verl_qerl.formats import get_format
from verl_qerl.formats.ignore import is_router
from verl_qerl.vllm_plugin import NAMES, PREFIX
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.options import asked_of_vllm, rollout_options
from verl_qerl.vllm_plugin.weights import reference_kernels
from verl_qerl.vllm_plugin.weights.borrowed import BorrowedNVFP4, is_borrowing
from verl_qerl.vllm_plugin.weights.experts import experts_method
from verl_qerl.vllm_plugin.weights.linear import W4A16Kernel
from verl_qerl.vllm_plugin.weights.plans import why_not

_MARLIN = "linear_backend='marlin'"
# Compute capabilities of the GPUs that vLLM 0.24.0 has a kernel for: at least the first, below the second.
_CAPABILITIES = {"fp8": (89, 1000), "int8": (75, 100), "mxfp4": (80, 1000), "nvfp4": (75, 1000)}


def why_not_on(capability: int, form: str) -> str | None:
    """Why a GPU cannot run a format, and what it can run instead; None where it can.

    Args:
        capability: Compute capability times ten, e.g. 90.
    """
    able = sorted(name for name, (least, end) in _CAPABILITIES.items() if least <= capability < end)
    if form in able:
        return None
    return (
        f"this GPU cannot run the format: rollout={form}, compute capability {capability / 10}."
        f" It can run {', '.join(able) or 'bf16 only'}. Choose one of them."
    )


class RolloutConfig(CompressedTensorsConfig):
    """compressed-tensors' configuration under our name; every linear not in `ignore` is of one format.

    Attributes:
        follows_loader: The checkpoint has no quantization_config, and the loader says which linears stay in bf16.
    """

    NAME = ""

    def __init__(self, **options: Any) -> None:
        self.follows_loader = not options  # vLLM gives none where the checkpoint has none
        if self.follows_loader:
            described = get_format(NAMES[self.NAME]).config()
            schemes = self._quantization_scheme_map_from_config(described)
            options = {"target_scheme_map": schemes, "ignore": described["ignore"], "quant_format": described["format"]}
        super().__init__(**options)

    def leave_dense(self, names: Iterable[str]) -> None:
        """Leave these modules, and no others, in bf16."""
        self.ignore = list(names)

    def get_name(self) -> Any:
        """`verl_qerl_<format>`."""
        return self.NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Take a compressed-tensors checkpoint when the user asked for us by name."""
        return cls.NAME if user_quant == cls.NAME else None

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of compressed-tensors, but routers are never packed, and experts also run without a GPU."""
        if is_router(prefix):
            return UnquantizedLinearMethod()
        return experts_method(layer, prefix, NAMES[self.NAME]) or super().get_quant_method(layer, prefix)

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        form = NAMES[self.NAME]
        capability = current_platform.get_device_capability()
        if capability is not None:
            problem = why_not_on(capability.to_int(), form)
            if problem:
                raise ValueError(problem)
        if form == "nvfp4" and self._is_nvfp4_format(weight_quant) and input_quant is None:
            return BorrowedNVFP4() if is_borrowing(get_current_vllm_config_or_none()) else W4A16NVFP4()
        if form == "mxfp4" and self._is_mxfp4(weight_quant) and input_quant is None:
            return W4A16MXFP4()
        is_w8a8 = {"fp8": self._is_fp8_w8a8, "int8": self._is_dynamic_token_w8a8}.get(form)
        if is_w8a8 is not None and is_w8a8(weight_quant, input_quant) and current_platform.is_cpu():
            return reference_kernels.W8A8Reference(form)
        return super()._get_scheme_from_parts(weight_quant, input_quant, *args, **kwargs)


# Written out, not made in a loop: vLLM sends them to its workers by name.
class FP8Config(RolloutConfig):
    """Rollouts in FP8."""

    NAME = f"{PREFIX}fp8"


class INT8Config(RolloutConfig):
    """Rollouts in INT8."""

    NAME = f"{PREFIX}int8"


class MXFP4Config(RolloutConfig):
    """Rollouts in MXFP4."""

    NAME = f"{PREFIX}mxfp4"


class NVFP4Config(RolloutConfig):
    """Rollouts in NVFP4."""

    NAME = f"{PREFIX}nvfp4"


CONFIGS: dict[str, type[RolloutConfig]] = {
    config.NAME: config for config in (FP8Config, INT8Config, MXFP4Config, NVFP4Config)
}


def _check_backend(form: str) -> None:
    """Refuse kernels that quantize activations: they read scales that a checkpoint of 4-bit weights lacks."""
    asked = asked_of_vllm(get_current_vllm_config_or_none())
    if asked not in (None, _MARLIN):
        raise ValueError(
            f"{form} weights under bf16 activations cannot run as vLLM was told: {asked}. Accepted are linear_backend"
            " auto and marlin, without VLLM_BATCH_INVARIANT (verl's rollout.full_determinism). Leave it out, or use a"
            " bf16 rollout."
        )


class W4A16NVFP4(CompressedTensorsW4A4Fp4):
    """Weight-only NVFP4: packed weights, activations in bf16."""

    def __init__(self) -> None:
        if current_platform.is_cpu():
            # vLLM's own __init__ raises on a CPU: it forces Marlin. The rest of it is these three attributes.
            self.use_a16 = True
            self.kernel = reference_kernels.ReferenceKernel(NvFp4LinearLayerConfig())
            self.group_size = 16
            return
        _check_backend("NVFP4")
        super().__init__(use_a16=True)
        config = get_current_vllm_config_or_none()
        options, asked = rollout_options(config), asked_of_vllm(config)
        if options.linear == "stock":
            return
        reason = f"{asked} asks for it" if asked else why_not()
        if reason:
            say_once(f"NVFP4 linears run on Marlin, which is slow for large batches: {reason}.")
            return
        self.kernel = W4A16Kernel(NvFp4LinearLayerConfig())


class W4A16MXFP4(CompressedTensorsW4A4Mxfp4):
    """Weight-only MXFP4: vLLM's own choice quantizes activations as well on GPUs that multiply 4-bit numbers."""

    def __init__(self) -> None:
        # Replaces vLLM's __init__, which chooses the kernel by the GPU.
        self.group_size = 32
        config = MxFp4LinearLayerConfig()
        if current_platform.is_cpu():
            self.kernel = reference_kernels.MXFP4ReferenceKernel(config)
            return
        _check_backend("MXFP4")
        from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel

        self.kernel = MarlinMxFp4LinearKernel(config)
