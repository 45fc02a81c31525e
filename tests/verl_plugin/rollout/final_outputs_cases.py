"""Started by test_rollout_final_outputs_on_cpu.py: verl's server over a real engine, asked both ways. Prints JSON.

python final_outputs_cases.py MODEL
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

from verl_qerl.verl_plugin.cpu import register

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
register()

import verl.workers.rollout.replica as replica  # noqa: E402
from verl.workers.rollout.vllm_rollout import vllm_async_server as verls  # noqa: E402
from vllm import AsyncEngineArgs  # noqa: E402
from vllm.v1.engine import output_processor  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from verl_qerl.verl_plugin.rollout import server as rollout  # noqa: E402
from verl_qerl.verl_plugin.rollout.engine_scores import SCORING  # noqa: E402

LONG = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 1500}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, "logprobs": True}


async def run_stock_server(self, args):
    self.engine = args


def make(cls, engine):
    """A server without verl's `__init__`, which wants Ray."""
    server = object.__new__(cls)
    server.config = SimpleNamespace(
        max_model_len=2048, response_length=1500, prompt_length=64, full_determinism=False, mtp=None,
        enable_rollout_routing_replay=False, custom={"qerl": {"base": "nvfp4"}}, get=lambda name, default: default,
    )  # fmt: skip
    server.model_config = SimpleNamespace(lora_rank=0, lora={}, processor=None)
    server.global_steps = server.replica_rank = server.node_rank = server._admitting = 0
    server._submission_paused = server._rejecting = False
    server._resume_event = asyncio.Event()
    server._disaggregation_role, server._pd_decode_peers = None, ()
    return server


async def count_outputs(server, number):
    """What an answer is, and how many outputs of it the process in front of the engine made."""
    made, new = 0, output_processor.RequestState._new_completion_output

    def counted(self, *args):
        nonlocal made
        made += 1
        return new(self, *args)

    output_processor.RequestState._new_completion_output = counted
    answer = await server.generate([5, 6, 7], dict(GREEDY), f"greedy {number}")
    output_processor.RequestState._new_completion_output = new
    return {"tokens": list(answer.token_ids), "log_probs": answer.log_probs, "why": answer.stop_reason, "made": made}


async def abort(server, number):
    """Three requests that are aborted while they run: seconds until that is done, and what became of them."""
    tasks = [asyncio.ensure_future(server.generate([8, 9], dict(LONG), f"long {number} {i}")) for i in range(3)]
    states = server.engine.output_processor.request_states
    while len(states) < 3 or not all(state.detokenizer.num_output_tokens() for state in states.values()):
        await asyncio.sleep(0.01)
    began = asyncio.get_running_loop().time()
    admitting = server._admitting
    said = await server.abort_all_requests()
    seconds = asyncio.get_running_loop().time() - began
    answers = await asyncio.gather(*tasks)
    await server.resume_generation()
    lengths = [len(answer.token_ids) for answer in answers]
    reasons = sorted({answer.stop_reason for answer in answers})
    return {"seconds": seconds, "admitting": [admitting, server._admitting], "said": said["aborted_count"],
            "lengths": lengths, "reasons": reasons}  # fmt: skip


async def score_behind_a_shut_door(server):
    """What a trainer does in `colocate_async`: requests are aborted, one waits, and the engine scores meanwhile."""
    running = asyncio.ensure_future(server.generate([8, 9], dict(LONG), "running"))
    while not server.engine.output_processor.request_states:
        await asyncio.sleep(0.01)
    await server.abort_all_requests()
    waiting = asyncio.ensure_future(server.generate([8, 9], dict(GREEDY), "waiting"))
    await server.resume_engine_generation()
    params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    scored = await asyncio.wait_for(server.generate([5, 6, 7], params, f"{SCORING}1"), 60)
    found = {"aborted": (await running).stop_reason, "waits": not waiting.done(), "admitting": server._admitting}
    await server.abort_all_requests()  # as verl does before it sleeps
    found["still waits"] = not waiting.done()
    await server.resume_generation()
    return found | {"scored": len(scored.extra_fields["prompt_logprobs"]), "then": (await waiting).stop_reason}


async def cancel(server):
    """A request whose caller goes away, and one that vLLM refuses: neither counts as one being admitted."""
    task = asyncio.ensure_future(server.generate([8, 9], dict(LONG), "cancelled"))
    await asyncio.sleep(0.5)
    task.cancel()
    (cancelled,) = await asyncio.gather(task, return_exceptions=True)
    (refused,) = await asyncio.gather(
        server.generate([8, 9], {"temperature": -1.0}, "refused"), return_exceptions=True
    )  # fmt: skip
    await asyncio.sleep(0.2)
    left = server.engine.output_processor.get_num_unfinished_requests()
    return {"cancelled": type(cancelled).__name__, "refused": type(refused).__name__, "left": left,
            "admitting": server._admitting, "asked": len(server._final_outputs._asked)}  # fmt: skip


async def main(model):
    args = AsyncEngineArgs(
        model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28, enforce_eager=True, disable_log_stats=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    rollout.install(replica)
    verls.vLLMReplica.__init__ = lambda self, *args: None
    ours = replica.get_rollout_replica_class("vllm")(0, None, None).server_class.__ray_metadata__.modified_class
    stock = make(verls.vLLMHttpServer, engine)
    stock.engine = engine
    found = {"stock": await count_outputs(stock, 0)}
    verls.vLLMHttpServer.run_server = run_stock_server
    server = make(ours, engine)
    await server.run_server(engine)
    found |= {"ours": await count_outputs(server, 1), "abort": await abort(server, 0), "gone": await cancel(server)}
    found["scoring"] = await score_behind_a_shut_door(server)
    found["after"] = await count_outputs(server, 2)
    found["of others"] = await count_outputs(stock, 3)
    print(json.dumps(found), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
