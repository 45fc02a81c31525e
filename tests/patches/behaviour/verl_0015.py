"""A server whose engine has said that the adapter is there asks no more before each request."""

import asyncio
from types import SimpleNamespace

import named_vllm  # noqa: F401  # before verl
from verl.workers.rollout.vllm_rollout import vllm_async_server as module

OUTPUT = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="stop")])


class Engine:
    """Counts questions; its adapter is there after `load`."""

    def __init__(self):
        self.asked, self.adapters, self.served = 0, set(), []

    async def list_loras(self):
        self.asked += 1
        return set(self.adapters)

    async def collective_rpc(self, method, timeout, args, kwargs):
        self.adapters.add(module.VLLM_LORA_INT_ID)

    async def generate(self, lora_request, **_):
        self.served.append(lora_request is not None)
        yield SimpleNamespace(**vars(OUTPUT), prompt_logprobs=None, kv_transfer_params=None, metrics=None)


async def main():
    server = object.__new__(module.vLLMHttpServer)  # without __init__, which starts an engine
    server.config = SimpleNamespace(
        max_model_len=64, response_length=8, prompt_length=8, full_determinism=False, custom=None, mtp=None,
        enable_rollout_routing_replay=False, get=lambda name, default: default,
    )  # fmt: skip
    server.model_config = SimpleNamespace(lora_rank=8, lora={}, processor=None)
    server.engine, server._submission_paused, server._admitting, server.global_steps = Engine(), False, 0, 0
    server._disaggregation_role, server._pd_decode_peers, server.replica_rank = None, (), 0
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
