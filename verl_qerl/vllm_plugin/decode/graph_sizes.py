"""Sizes of CUDA graphs beyond vLLM's largest, 512 tokens, for rollouts that decode more sequences at once."""

VLLMS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # vLLM 0.24.0, config/vllm.py, _set_cudagraph_sizes
_STEP = 64  # as far apart as larger ones are: at most an eighth of a step is padding


def larger_sizes(sequences: int) -> list[int]:
    """Sizes of CUDA graphs that an engine which decodes so many sequences at once needs beside vLLM's own; often none.

    Without a graph a step is as long as the host takes to launch it.
    """
    return [*range(VLLMS[-1] + _STEP, sequences, _STEP), sequences] if sequences > VLLMS[-1] else []
