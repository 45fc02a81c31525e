"""What bench_rollout.py makes an engine do, and about how long that takes: lengths, cache, CUDA graphs, seconds.

The seconds are those of stock bf16 with LoRA on one H200, within a third (results/h200/rollout_7b_a966dd7.json), so
that a measurement which would not end in time is not begun.
"""

import math
import random
from typing import Any

from rollout_worker import GIB

from verl_qerl.vllm_plugin.decode.graph_sizes import VLLMS, larger_sizes

# Answer lengths of the realistic rollout: lognormal with this median and sigma, at least MIN, cut at MAX.
LENGTHS = {"median": 400, "sigma": 0.8, "min": 16, "max": 2048, "seed": 0}
PROFILED_STEPS = 16
PROFILE_TOKENS = 128  # of a profiled sequence: the first ones decode while the last ones are still prefilled


def decode_ms(one: float, many: float, new_tokens: int) -> float:
    """ms per step, from the seconds of one new token (the prefill) and of `new_tokens`."""
    return (many - one) / (new_tokens - 1) * 1e3


def draw_lengths(count: int) -> list[int]:
    """Long-tailed answer lengths, the same in every arm."""
    source = random.Random(LENGTHS["seed"])
    drawn = (source.lognormvariate(math.log(LENGTHS["median"]), LENGTHS["sigma"]) for _ in range(count))
    return [min(max(round(length), LENGTHS["min"]), LENGTHS["max"]) for length in drawn]


def capture_sizes(batches: list[int], largest: int, realistic: bool, larger: bool) -> list[int]:
    """Sizes of CUDA graphs: every batch exactly up to where vLLM's own list ends; all of its steps if needed.

    Args:
        batches: Of the rows.
        largest: Sequences at once.
        realistic: Batches of any size come.
        larger: Beyond vLLM's own list too, as in runs of ours.
    """
    end = min(2 * largest, VLLMS[-1])
    sizes = {1, 2, 4, end, *batches} | (set(range(8, end + 1, 8)) if realistic else set())
    return sorted(size for size in sizes if size <= end) + (larger_sizes(largest) if larger else [])


def kv_tokens(sequences: int, length: int, block: int) -> int:
    """Tokens of cache that `sequences` of `length` occupy; one block each for the step that is scheduled ahead."""
    return sequences * (math.ceil(length / block) + 1) * block


def memory_options(shape: Any, linear_bytes: float, ranks: int, sequences: int, length: int) -> dict[str, Any]:
    """Of vllm.LLM: a KV cache of just the size needed, so that the peak says something; else what there is.

    Args:
        shape: Of rollout_arms.SHAPES.
        linear_bytes: Resident bytes per weight of a linear.
        ranks: GPUs that share the model.
        sequences: At once.
        length: Of the longest one.
    """
    # The platform is asked, not torch: workers of a parallel engine are forked, which CUDA does not survive.
    from vllm.platforms import current_platform

    block = 16 if current_platform.is_cuda() else 128  # vLLM's defaults
    need = (kv_tokens(sequences, length, block) + 64 * block) * shape.kv_bytes // ranks
    if not current_platform.is_cuda():
        return {"kv_cache_memory_bytes": need}
    total = current_platform.get_device_total_memory()
    if need + shape.weight_bytes(linear_bytes) / ranks + 16 * GIB < 0.92 * total:
        return {"kv_cache_memory_bytes": need}
    return {"gpu_memory_utilization": 0.92}


def forget_prompts(llm: Any) -> None:
    """Empty the prefix cache, so that the next measurement computes all of its prompts."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache still belongs to requests of an earlier measurement.")


def settings(config: Any) -> dict[str, Any]:
    """Of vLLM's configuration: how an engine runs, for the result file."""
    return {
        "quantization": config.model_config.quantization,
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        "prefix_caching": config.cache_config.enable_prefix_caching,
    }


def step_seconds(shape: Any, batch: int) -> float:
    """Of one decode step."""
    return (1.2e-3 + 0.35e-12 * shape.weight_bytes(2.0)) * (1 + max(0, batch - 32) / 160)


def prefill_seconds(shape: Any, tokens: int) -> float:
    """Of one prefill of so many tokens in all."""
    return 3.5e-15 * shape.weight_bytes(2.0) / 2 * tokens


def fixed_seconds(shape: Any, batch: int, prompt: int, new_tokens: int, repeats: int) -> float:
    """Of one row: warming up, one new token, and all of them."""
    prefills = prefill_seconds(shape, batch * prompt) * (1 + 2 * repeats)
    return prefills + repeats * new_tokens * step_seconds(shape, batch)


def realistic_seconds(shape: Any, answers: int, prompt: int, largest: int) -> float:
    """Of the realistic rollout; its tail runs at a small batch."""
    lengths = draw_lengths(answers)
    full = sum(lengths) / largest * step_seconds(shape, largest)
    return full + LENGTHS["max"] / 2 * step_seconds(shape, 1) + prefill_seconds(shape, answers * prompt)


def profile_seconds(shape: Any, batch: int, prompt: int, new_tokens: int) -> float:
    """Of one profile, with the reading of its trace."""
    return 5 + prefill_seconds(shape, batch * prompt) + 2 * new_tokens * step_seconds(shape, batch)


def startup_seconds(shape: Any) -> float:
    """Of an engine: imports, weights, compilation, CUDA graphs."""
    return 45 + 0.7e-9 * shape.weight_bytes(2.0)
