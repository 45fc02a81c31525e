"""Started by test_server_adapter_on_cpu.py, and by tests/patches where verl has its patch: where weights are synced.

Prints what both ends of a sync say in two Ray clusters, of which only the names are there, as JSON.
"""

import asyncio
import json
import os
import threading
from types import SimpleNamespace

import ray

from verl_qerl.verl_plugin.cpu import register

os.environ |= {"RANK": "1", "RAY_LOCAL_WORLD_SIZE": "2", "VERL_PLATFORM": "cpu"}
register()  # also where verl is started without plugins

import verl.workers.rollout.replica as replica  # noqa: E402
from verl.workers.config import RolloutConfig  # noqa: E402
from verl.workers.rollout.base import get_rollout_class  # noqa: E402
from verl.workers.rollout.vllm_rollout import ServerAdapter, vllm_async_server  # noqa: E402
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402

from verl_qerl.modules.placement.lending import meeting_place  # noqa: E402
from verl_qerl.verl_plugin.actor import lend_base  # noqa: E402
from verl_qerl.verl_plugin.rollout import server as rollout  # noqa: E402
from verl_qerl.verl_plugin.weight_sync import transfer  # noqa: E402


class NamedError(Exception):
    """verl's server has told its workers what they need."""


def init(self, *args, **kwargs):
    try:
        verls_init(self, *args, **kwargs)
    except NamedError:
        return
    raise RuntimeError("the server reads its configuration no more")


def stop(self, config):
    raise NamedError


rollout.install(replica)
verls_init = vllm_async_server.vLLMHttpServer.__init__
vllm_async_server.vLLMHttpServer.__init__ = init
vllm_async_server.vLLMHttpServer._init_config = stop
vllm_async_server.vLLMReplica.__init__ = lambda self, *args: None
Replica = replica.get_rollout_replica_class("vllm")
QerlServer = Replica(0, None, None).server_class.__ray_metadata__.modified_class
lend_base.share_base = lambda module: SimpleNamespace(flat=SimpleNamespace(numel=lambda: 0))
lend_base.Lender = lambda base, path: SimpleNamespace(base=base, path=path)
ray.is_initialized = lambda: True


def receiver(server):
    server(None, None, None, [], 0, 0, 2, 1, "")
    worker = SimpleNamespace(model_runner=None, local_rank=1)
    return vLLMColocateWorkerExtension._get_zmq_handle(worker)


def sender(**disaggregation):
    ranks = 1 if disaggregation else 2
    config = RolloutConfig(name="vllm", tensor_model_parallel_size=ranks, disaggregation=disaggregation)
    return get_rollout_class("vllm")(config, SimpleNamespace(), None).zmq_handle


def sync(**answers):
    """What becomes of a weight sync whose server says whether its engine has ended, or has no such method."""

    def asked(answer):
        async def remote():
            return answer

        return SimpleNamespace(remote=remote)

    async def verls(self, weights, global_steps=None):
        sent.append((weights, global_steps))

    sent, before = [], ServerAdapter.update_weights
    ServerAdapter.update_weights = verls
    try:
        config = RolloutConfig(name="vllm", tensor_model_parallel_size=2)
        adapter = get_rollout_class("vllm")(config, SimpleNamespace(), None)
        there = {name: asked(answer) for name, answer in answers.items()}
        adapter.server_handle = SimpleNamespace(**there)
        adapter._ensure_server_handle = lambda: True
        asyncio.run(adapter.update_weights("weights", global_steps=3))
    except RuntimeError as error:
        return [str(error), sent]
    finally:
        ServerAdapter.update_weights = before
    return [None, sent]


def looked_after(ended, worker):
    """What a sender that waits is told: of an engine, and of a worker that receives, has failed or has received all."""

    def asked(answers):
        async def remote():
            return answers.pop(0)

        return remote

    async def verls(self, weights):
        await self._execute_method("update_weights_from_ipc", non_block=True)
        transfer._require_receiver.get()()

    async def call(self, method, **options):
        return worker

    def get(reference, timeout=None):
        if isinstance(reference, Exception):
            raise reference
        return asyncio.run_coroutine_threadsafe(reference, loop).result() if asyncio.iscoroutine(reference) else None

    before = ServerAdapter.update_weights, ServerAdapter._execute_method, ray.get, ray.wait
    ServerAdapter.update_weights, ServerAdapter._execute_method = verls, call
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ray.get, ray.wait = get, lambda references, timeout: ([one for one in references if one != "waits"], [])
    try:
        adapter = get_rollout_class("vllm")(RolloutConfig(name="vllm"), SimpleNamespace(), None)
        adapter.server_handle = SimpleNamespace(qerl_ended=SimpleNamespace(remote=asked([False, ended])))
        adapter._ensure_server_handle = lambda: True
        asyncio.run(adapter.update_weights("weights"))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ServerAdapter.update_weights, ServerAdapter._execute_method, ray.get, ray.wait = before
        loop.call_soon_threadsafe(loop.stop)
    return transfer._require_receiver.get()


def found(session):
    node = SimpleNamespace(session_name=session)
    context = SimpleNamespace(worker=SimpleNamespace(node=node), get_session_name=lambda: session)
    context.get_job_id = lambda: "01000000"
    ray.get_runtime_context = lambda: context
    split = {"enabled": True, "prefill_replicas": 1, "decode_replicas": 1}
    return {
        "ends": [sender(), receiver(QerlServer)],
        "base": [
            str(lend_base.lend_base(None, 3).path),
            str(meeting_place(os.environ["VERL_RAY_JOB_ID"], 3)),  # as borrowed.py asks
        ],
        "syncs": [sync(qerl_ended=True), sync(qerl_ended=False), sync()],
        "waiting": [
            looked_after(False, "waits"),
            looked_after(True, "waits"),
            looked_after(False, ValueError("no memory")),
            looked_after(False, "all received"),
            looked_after(False, None),  # a rank that asks no server
        ],
        "split": [sender(**split), receiver(vllm_async_server.vLLMHttpServer)],
    }


print(json.dumps([found("session_1"), found("session_2")]))
