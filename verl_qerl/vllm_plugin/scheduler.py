"""vLLM's scheduler, letting requests that wait begin together, every 16 steps.

A step in which a request begins runs no CUDA graph of whole decode steps, and beside 256 others goes beyond the 256
rows that our kernels take at a time. Of a rollout with more answers than run at once a sixth of the steps or more is of
this kind, since whenever an answer ends another request begins.

vLLM knows how to hold requests back, for the ranks of a data-parallel engine (`prefill_schedule_interval`); here that
is done for one engine, and also where more wait than there is room for, which is when it pays.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

_INTERVAL = 16  # steps; a request begins with a delay of half of it on average
_LEAST_RUNNING = 32  # of fewer, one that waits is missed more than its step costs


class _Gathering(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked = self.scheduler_config.prefill_schedule_interval
        self._interval = asked if asked > 1 else _INTERVAL
        self._to_hold = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM's."""
        held = self._to_hold > 0 and len(self.running) >= _LEAST_RUNNING
        if held:
            self.prefill_capacity_bound = False  # else vLLM holds nothing back while the engine is full
        found = super().schedule(throttle_prefills or held)
        began = found.scheduled_new_reqs or found.scheduled_cached_reqs.resumed_req_ids
        # A step that is as large as may be leaves prompts behind, which the next one takes in the same way.
        if began and found.total_num_scheduled_tokens < self.max_num_scheduled_tokens:
            self._to_hold = self._interval - 1
        else:
            self._to_hold = max(0, self._to_hold - 1)
        return found


class _AsyncGathering(_Gathering, AsyncScheduler):
    pass


def gathering_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """For vLLM's `scheduler_cls`: `prefill_schedule_interval` steps (16 by its default of 1) between two that admit.

    Args:
        vllm_config: Of the engine; whether it schedules ahead decides which of vLLM's schedulers this is.
        kwargs: As vLLM's schedulers.
    """
    ahead = vllm_config.scheduler_config.async_scheduling
    return (_AsyncGathering if ahead else _Gathering)(vllm_config=vllm_config, **kwargs)
