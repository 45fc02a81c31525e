"""A mode has whole graphs of steps in which requests begin, and others of steps that decode."""

from types import SimpleNamespace

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.config.compilation import CompilationMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

SIZES = [1, 8, 16, 24, 32]


def kinds_of(mode: CUDAGraphMode) -> list[set[bool]]:
    """Of each list of whole graphs that is captured: whether its steps only decode."""
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=list(SIZES),
        max_cudagraph_capture_size=SIZES[-1],
        splitting_ops=list(CompilationConfig._attention_ops),
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        num_speculative_tokens=0,
        lora_config=None,
    )
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(mode, 1)
    if mode == CUDAGraphMode.FULL_AND_PIECEWISE and dispatcher.dispatch(20)[0] != CUDAGraphMode.PIECEWISE:
        raise RuntimeError("a step in which requests begin has no pieces, so that this asks the wrong thing")
    return [
        {key.uniform for key in keys} for runs, keys in dispatcher.get_capture_descs() if runs == CUDAGraphMode.FULL
    ]


found = {mode.name: kinds_of(mode) for mode in CUDAGraphMode if mode.has_full_cudagraphs()}
assert [{False}, {True}] in found.values(), f"no mode has whole graphs of both kinds: {found}"
