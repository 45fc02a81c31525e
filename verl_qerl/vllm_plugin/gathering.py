"""vLLM's scheduler, with requests that begin together.

A step in which a request begins takes longer than one that only decodes, and where more requests wait than there is
room for, another one begins whenever an answer ends. vLLM holds requests back by its `prefill_schedule_interval` for
the ranks of a data-parallel engine, and for no other; this does it for one engine, and also where it is full.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

_LEAST_RUNNING = 32  # of fewer, one that waits is missed more than its step costs


class GatheringScheduler(Scheduler):
    """Lets requests that wait begin together, once in `prefill_schedule_interval` steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
            self._to_hold = self.scheduler_config.prefill_schedule_interval - 1
        else:
            self._to_hold = max(0, self._to_hold - 1)
        return found


class AsyncGatheringScheduler(GatheringScheduler, AsyncScheduler):
    """The same for an engine that schedules ahead."""
