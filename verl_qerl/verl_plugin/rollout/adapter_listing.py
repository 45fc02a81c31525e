"""Which adapters a vLLM engine holds, without asking its workers before every request (patches/verl/0015).

verl's server asks before each request of a run with an adapter. The engine hands the question to every worker, behind
the pass that is under way and before the next one, and an engine that ends leaves it without an answer: the request
waits for ever, and so does the step.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from verl_qerl import upstream
from verl_qerl.vllm_plugin import hosts

_LOOK_S = 1.0  # seconds between two looks whether the engine has ended while it is asked


class AdapterListing:
    """Takes the place of `AsyncLLM.list_loras`: asks once between two calls that may change the answer."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._ask = engine, engine.list_loras
        self._asked: asyncio.Task[set[int]] | None = None
        upstream.set_method(hosts.LIST_LORAS, engine, self)
        for change in hosts.CHANGE_LORAS:
            name = change.target.rpartition(".")[2]
            upstream.set_method(change, engine, self._forgetting(getattr(engine, name)))

    async def __call__(self) -> set[int]:
        """Numbers of the adapters; an EngineDeadError if the engine has ended."""
        asked = self._asked
        if asked is None:
            asked = self._asked = asyncio.ensure_future(self._ask())
        while not asked.done():
            await asyncio.wait({asked}, timeout=_LOOK_S)
            if not asked.done() and self._engine.errored:
                raise self._engine.dead_error
        if asked.exception() is not None and self._asked is asked:
            self._asked = None
        return asked.result()

    def _forgetting(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def forgetting(*args: Any, **kwargs: Any) -> Any:
            self._asked = None
            try:
                return await call(*args, **kwargs)
            finally:
                self._asked = None  # a request may have asked while the workers changed theirs

        return forgetting
