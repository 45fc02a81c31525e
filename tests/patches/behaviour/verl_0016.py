"""A server asks for an answer when it is whole, without text; a request is admitted as soon as its engine has it."""

import asyncio
from types import SimpleNamespace

from bare_server import bare_server
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

OUTPUT = SimpleNamespace(
    outputs=[SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="stop")], prompt_logprobs=None, metrics=None,
    kv_transfer_params=None, finished=True,
)  # fmt: skip


class Engine:
    """Takes requests in both of vLLM's ways, and finishes them when it is told to."""

    def __init__(self):
        self.asked, self.taken, self.finished = [], asyncio.Event(), asyncio.Event()

    async def add_request(self, request_id, prompt, params, **_):
        self.asked.append(params)
        collector = RequestOutputCollector(params.output_kind, request_id)
        asyncio.ensure_future(self.finished.wait()).add_done_callback(lambda _: collector.put(OUTPUT))
        self.taken.set()
        return collector

    async def generate(self, prompt, sampling_params, request_id, **more):
        yield await (await self.add_request(request_id, prompt, sampling_params, **more)).get()


async def main():
    server = bare_server(Engine(), lora_rank=0)
    found = []
    for params in ({}, {"stop": ["."]}):
        server.engine.taken.clear()
        server.engine.finished.clear()
        task = asyncio.ensure_future(server.generate([1, 2], params, f"request {len(found)}"))
        await server.engine.taken.wait()
        await asyncio.sleep(0)
        admitting = server._admitting
        server.engine.finished.set()
        answer = await task
        if answer.token_ids != [5] or server._admitting:
            raise RuntimeError(f"the answer is {answer.token_ids}, requests being admitted {server._admitting}")
        found.append((server.engine.asked[-1], admitting))
    return found


(plain, admitting), (stopped, _) = asyncio.run(main())
if not stopped.detokenize:
    raise RuntimeError("stop strings are not looked for")
assert plain.output_kind == RequestOutputKind.FINAL_ONLY, plain.output_kind
assert not plain.detokenize, "text is asked for"
assert admitting == 0, "a request that the engine has is not admitted"
