"""A server whose engine has said that the adapter is there asks no more before each request."""

import asyncio
from types import SimpleNamespace

from bare_server import bare_server
from verl.workers.rollout.vllm_rollout.vllm_async_server import VLLM_LORA_INT_ID

OUTPUT = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="stop")])


class Engine:
    """Counts questions; its adapter is there after `load`."""

    def __init__(self):
        self.asked, self.adapters, self.served = 0, set(), []

    async def list_loras(self):
        self.asked += 1
        return set(self.adapters)

    async def collective_rpc(self, method, timeout, args, kwargs):
        self.adapters.add(VLLM_LORA_INT_ID)

    async def generate(self, lora_request, **_):
        self.served.append(lora_request is not None)
        yield SimpleNamespace(**vars(OUTPUT), prompt_logprobs=None, kv_transfer_params=None, metrics=None)


async def main():
    server = bare_server(Engine(), lora_rank=8)
    for number in range(2):
        await server.generate([1, 2], {}, f"before {number}")
    await server.collective_rpc("load")
    server.engine.asked = 0
    for number in range(3):
        await server.generate([1, 2], {}, f"after {number}")
    return server.engine


engine = asyncio.run(main())
if engine.served != [False, False, True, True, True]:
    raise RuntimeError(f"requests went to other adapters: {engine.served}")
assert engine.asked <= 1, f"three requests asked {engine.asked} times"
