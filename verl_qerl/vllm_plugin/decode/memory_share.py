"""Sleep mode makes vLLM 0.24.0 give the KV cache more memory than its share; this keeps it within the share.

CuMemAllocator.use_memory_pool (vllm/device_allocator/cumem.py) unmaps what is free of its memory when weights are
loaded. torch counts it as reserved on, so that memory_profiling (vllm/utils/mem_utils.py) finds as much less of what is
not torch's, and Worker.determine_available_memory gives the KV cache as much more than gpu_memory_utilization allows.

The free memory comes from a limit of vLLM's own (Worker._scoped_allocator_max_split, vllm/v1/worker/gpu_worker.py).
torch takes tensors of 1 to 10 MiB from segments of 20 MiB, and with max_split_size_mb:20 it gives no free block of that
size to a smaller tensor. So a segment that becomes empty is not used again until loading ends, and repacking weights
empties hundreds of them (patches/vllm/0001).
"""

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from verl_qerl import upstream
from verl_qerl.planning.memory_plan import GIB
from verl_qerl.vllm_plugin import hosts

logger = logging.getLogger(__name__)

_SPLIT_MIB = 21  # above torch's segments of 20 MiB, so that an empty one is used again


def use_segments_again(worker: Any, vllm_config: Any) -> None:
    """Make a worker with sleep mode load its weights in segments that can be reused once they are empty."""
    if not vllm_config.model_config.enable_sleep_mode:
        return
    limited = worker._scoped_allocator_max_split

    def limited_above_segments(max_split_size_mb: int) -> AbstractContextManager:
        return limited(max_split_size_mb=max(max_split_size_mb, _SPLIT_MIB))

    upstream.set_method(hosts.MAX_SPLIT, worker, limited_above_segments)


def stay_within_share(worker: Any, vllm_config: Any) -> None:
    """Make a worker with sleep mode give the KV cache no more than what is left of its share of the GPU.

    Args:
        worker: vLLM's worker; on a GPU it has `requested_memory`, `init_snapshot` and, from its profile,
            `peak_activation_memory` and `cudagraph_memory_estimate` when it is asked, all in bytes.
        vllm_config: A KV cache whose size it gives in bytes keeps that size.
    """
    if not vllm_config.model_config.enable_sleep_mode or vllm_config.cache_config.kv_cache_memory_bytes:
        return
    determine = worker.determine_available_memory

    def determine_what_is_left() -> int:
        found = determine()
        if worker.device.type != "cuda":
            return found
        from vllm import envs

        free, _ = torch.cuda.mem_get_info(worker.device)
        taken = worker.init_snapshot.free_memory - free
        # As the profile does: what a pass takes for a moment, and graphs captured on trial, are free again.
        graphs = worker.cudagraph_memory_estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
        left = worker.requested_memory - taken - worker.peak_activation_memory - graphs
        if found <= left:
            return found
        logger.warning(
            "verl_qerl: vLLM's profile has %.1f GiB for the KV cache, of which %.1f are left of its share of the GPU;"
            " it gets those.",
            found / GIB,
            left / GIB,
        )
        return left

    upstream.set_method(hosts.AVAILABLE_MEMORY, worker, determine_what_is_left)
