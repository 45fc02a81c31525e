"""Which batches a rollout has CUDA graphs for: all that decode, where vLLM ends at 512 tokens."""

VLLMS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # vLLM 0.24.0, config/vllm.py, _set_cudagraph_sizes
_STEP = 64  # as far apart as larger ones are: at most an eighth of a step is padding


def graph_sizes(sequences: int) -> list[int] | None:
    """Sizes of CUDA graphs for an engine that decodes so many sequences at once; None where vLLM's own hold them.

    Without a graph a step is as long as the host takes to launch it.
    """
    if sequences <= VLLMS[-1]:
        return None
    return [*VLLMS, *range(VLLMS[-1] + _STEP, sequences, _STEP), sequences]
