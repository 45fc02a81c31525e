"""The server's collective_rpc returns what the workers return."""

import asyncio

import named_vllm  # noqa: F401  # before verl
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


class Engine:
    """Stands for two workers."""

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple, kwargs: dict) -> list:
        return [(rank, method, timeout, args, kwargs) for rank in range(2)]


server = object.__new__(vLLMHttpServer)  # without __init__, which starts an engine
server.engine = Engine()
results = asyncio.run(server.collective_rpc("digest", timeout=1.0, args=(3,), kwargs={"layer": 0}))
expected = [(rank, "digest", 1.0, (3,), {"layer": 0}) for rank in range(2)]
assert results == expected, f"collective_rpc returned {results}"
