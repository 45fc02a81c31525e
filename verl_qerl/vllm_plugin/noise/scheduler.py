"""vLLM's scheduler with a prefix cache that holds prompts alone, for `aqn.draw` of `sequence` or `token`.

Keys and values of an answer are those of its own draw, so that no other request may read them.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from verl_qerl import upstream
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.noise.noise_rows import row_asked_for
from verl_qerl.vllm_plugin.options import rollout_options


def scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """For vLLM's `scheduler_cls`: the scheduler that vLLM would choose, with such a cache where the noise needs it."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    made = kind(vllm_config=vllm_config, **kwargs)
    aqn = rollout_options(vllm_config).aqn
    if aqn.enabled and aqn.draw != "batch":
        cache_prompts_alone(made.kv_cache_manager)
    return made


def cache_prompts_alone(manager: Any) -> None:
    """Make a KVCacheManager keep tokens of answers out of the prefix cache.

    A request that asks for a row of the noise (`algos.aqn.FORCED_DRAW`) neither reads the cache nor adds to it: its
    prompt has noise too. A preempted request does not read it where it holds more than its prompt: the rest is
    its answer, computed without noise in the prompt of another request.
    """
    coordinator = manager.coordinator
    cache_blocks, get_computed_blocks = coordinator.cache_blocks, manager.get_computed_blocks

    def cache_blocks_of_prompt(request: Any, num_computed_tokens: int) -> None:
        if row_asked_for(request.sampling_params) is None:
            cache_blocks(request, min(num_computed_tokens, request.num_prompt_tokens))

    def get_blocks_of_clean_prompt(request: Any) -> Any:
        if row_asked_for(request.sampling_params) is None:
            found = get_computed_blocks(request)
            if found[1] <= request.num_prompt_tokens:
                return found
        upstream.set_data(hosts.REQUEST, request, skip_reading_prefix_cache=True)
        return get_computed_blocks(request)

    upstream.set_method(hosts.CACHE_BLOCKS, coordinator, cache_blocks_of_prompt)
    upstream.set_method(hosts.COMPUTED_BLOCKS, manager, get_blocks_of_clean_prompt)
