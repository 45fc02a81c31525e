"""CUDA graphs of whole steps in which requests begin beside others that decode.

vLLM has such a step run piece by piece: a graph between any two attentions, and each attention called by Python, which
takes the host some milliseconds more than the step takes the GPU (7B). FlashAttention 3 can be captured with any
lengths of queries, and `cudagraph_mode=FULL` would do it, but then steps that only decode have no graphs of their own,
in which attention knows that each sequence brings one token.
"""

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from verl_qerl.vllm_plugin.plans import say_once

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class WholeStepDispatcher(CudagraphDispatcher):
    """Knows whole graphs in the place of vLLM's pieces; `use_whole_graphs` makes it of vLLM's."""

    def initialize_cudagraph_keys(self, cudagraph_mode: Any, *args: Any, **options: Any) -> None:
        """As vLLM's, with whole graphs in the place of pieces."""
        super().initialize_cudagraph_keys(cudagraph_mode, *args, **options)
        if cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
            return
        pieces, self.cudagraph_keys[PIECEWISE] = self.cudagraph_keys[PIECEWISE], set()
        for key in pieces:
            # With the number of requests, which FlashAttention's schedule of a step is made for.
            whole = self._create_padded_batch_descriptor(key.num_tokens, False, key.has_lora, key.num_active_loras)
            self.add_cudagraph_key(FULL, whole)

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, **options: Any) -> tuple[Any, Any]:
        """As vLLM's; a step that decodes and has no graph of its own takes the one of any step of its size.

        vLLM has none for more sequences than may run: with 20 at most, 20 would decode in pieces of 24.
        """
        found = super().dispatch(num_tokens, uniform_decode, **options)
        if uniform_decode and found[0] == CUDAGraphMode.NONE:
            return super().dispatch(num_tokens, False, **options)
        return found

    def get_capture_descs(self) -> list[tuple[Any, list[Any]]]:
        """As vLLM's, which takes a list to be of one kind: steps that only decode apart from the others."""
        found = super().get_capture_descs()
        kinds = [
            (mode, [one for one in keys if one.uniform == uniform]) for uniform in (False, True) for mode, keys in found
        ]
        return [(mode, keys) for mode, keys in kinds if keys]


def why_pieces(runner: Any) -> str | None:
    """Why steps in which requests begin stay in pieces, or None.

    Args:
        runner: vLLM's GPUModelRunner, with its model loaded.
    """
    if type(getattr(runner, "cudagraph_dispatcher", None)) is not CudagraphDispatcher:
        name = f"{type(runner).__module__}.{type(runner).__name__}"
        return (
            f"{name} has another dispatcher (with VLLM_USE_V2_MODEL_RUNNER=0 vLLM runs the model runner that is known)"
        )
    config: Any = runner.vllm_config
    parallel = config.parallel_config
    mode = config.compilation_config.cudagraph_mode
    reasons = {
        f"cudagraph_mode is {mode}, not FULL_AND_PIECEWISE": mode != CUDAGraphMode.FULL_AND_PIECEWISE,
        "prefixes that sequences share are taken apart": not config.model_config.disable_cascade_attn,
        "tokens are speculated": config.num_speculative_tokens > 0,
        "ranks of a data-parallel engine agree on their graphs": parallel.data_parallel_size > 1,
        "ranks share the keys of a sequence": (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1
        ),
        "the model has an encoder": config.model_config.is_encoder_decoder,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        return reason
    for name, layer in config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "get_attn_backend"):  # experts
            continue
        builder = layer.get_attn_backend().get_builder_cls()
        support = builder.get_cudagraph_support(config, layer.get_kv_cache_spec(config))
        if support != AttentionCGSupport.ALWAYS:
            return f"{builder.__name__} of {name} can be captured for {support.name} only"
    return None


def use_whole_graphs(runner: Any, required: bool = True) -> None:
    """Have a model runner capture whole steps. Call it after loading and before graphs are captured.

    Args:
        runner: vLLM's GPUModelRunner.
        required: Else on a GPU only, and vLLM's graphs stay where whole ones cannot be had: the log has the reason,
            unless it is the `cudagraph_mode` that was asked for.

    Raises:
        ValueError: They are required and cannot be had; with the reason.
    """
    if not required and runner.device.type != "cuda":
        return
    reason = why_pieces(runner)
    if reason is None:
        runner.cudagraph_dispatcher.__class__ = WholeStepDispatcher
    elif required:
        raise ValueError(
            f"additional_config.verl_qerl.graphs='whole' cannot be had: {reason}. Accepted here are 'auto', the"
            " default, and 'stock'. Leave it out."
        )
    elif runner.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
        say_once(f"steps in which requests begin have no CUDA graphs of their own: {reason}.")
