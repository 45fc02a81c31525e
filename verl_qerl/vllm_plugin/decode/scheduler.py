"""vLLM's scheduler with less work for requests that decode.

In each step schedule() calls KVCacheManager.allocate_slots for every running request. With blocks of 16 tokens there is
mostly nothing to allocate, and vLLM takes some 5 us to find that out. At 256 sequences schedule() took 1.77 ms of a
step on one core, and takes 1.09 ms now (tests/bench/results/cpu/schedule.json; patches/vllm/0002), for which the GPU of
a small model waits.

Where `aqn.draw` is `sequence` or `token` the prefix cache holds prompts alone: keys and values of an answer are those
of its own draw.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from verl_qerl import upstream
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.noise.noise_rows import row_asked_for
from verl_qerl.vllm_plugin.options import rollout_options

# What schedule() says of a running request: no tokens of a draft. Of one that begins it says more.
_OF_RUNNING = {"num_lookahead_tokens": 0}


class RoomyKVCacheManager(KVCacheManager):
    """Of one kind of full attention; `use_roomy_blocks` makes it of vLLM's.

    Attributes:
        qerl_prompts_alone: Blocks with tokens of an answer are not cached for others.
    """

    qerl_prompts_alone = False

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        """As vLLM's: the new blocks of a request, of which one that has room for its token needs none."""
        if num_new_tokens == 1 and options == _OF_RUNNING and not args and self._has_room(request):
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **options)

    def _has_room(self, request: Any) -> bool:
        """Whether the next token fits, and no block is full that vLLM has not cached for others."""
        (manager,) = self.coordinator.single_type_managers
        size, tokens = manager.block_size, request.num_computed_tokens + 1
        if tokens > len(manager.req_to_blocks[request.request_id]) * size:
            return False
        cached = min(tokens, request.num_prompt_tokens) if self.qerl_prompts_alone else tokens
        return not self.enable_caching or cached // size <= manager.num_cached_block.get(request.request_id, 0)


def use_roomy_blocks(manager: Any) -> bool:
    """Make vLLM's KVCacheManager a RoomyKVCacheManager, if its cache is one that full attention alone has.

    Returns:
        Whether it is one now; any other stays as it is.
    """
    kinds = [type(one) for one in manager.coordinator.single_type_managers]
    if type(manager) is not KVCacheManager or kinds != [FullAttentionManager]:
        return False
    upstream.swap_class(hosts.KV_CACHE_MANAGER, manager, RoomyKVCacheManager)
    return True


def cache_prompts_alone(manager: Any) -> None:
    """Have a KVCacheManager keep tokens of answers out of the prefix cache.

    A request that asks for a row of the noise (`algos.aqn.FORCED_DRAW`) neither reads the cache nor adds to it: its
    prompt has noise too.
    """
    coordinator = manager.coordinator
    cache_blocks, get_computed_blocks = coordinator.cache_blocks, manager.get_computed_blocks

    def cache_blocks_of_prompt(request: Any, num_computed_tokens: int) -> None:
        if row_asked_for(request.sampling_params) is None:
            cache_blocks(request, min(num_computed_tokens, request.num_prompt_tokens))

    def get_blocks_of_clean_prompt(request: Any) -> Any:
        if row_asked_for(request.sampling_params) is not None:
            upstream.set_data(hosts.REQUEST, request, skip_reading_prefix_cache=True)
        return get_computed_blocks(request)

    upstream.hang(hosts.CACHE_BLOCKS, coordinator, cache_blocks_of_prompt)
    upstream.hang(hosts.COMPUTED_BLOCKS, manager, get_blocks_of_clean_prompt)
    manager.qerl_prompts_alone = True


def scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """For vLLM's `scheduler_cls`: the scheduler that it would have by itself, over a RoomyKVCacheManager.

    Args:
        vllm_config: Of the engine; whether it schedules ahead decides which of vLLM's schedulers this is.
        kwargs: As vLLM's schedulers.
    """
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    made = kind(vllm_config=vllm_config, **kwargs)
    use_roomy_blocks(made.kv_cache_manager)
    aqn = rollout_options(vllm_config).aqn
    if aqn.enabled and aqn.draw != "batch":
        cache_prompts_alone(made.kv_cache_manager)
    return made
