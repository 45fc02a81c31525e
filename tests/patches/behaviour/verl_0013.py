"""Two Ray clusters of a host, whose first jobs have one id, sync weights at two addresses."""

import os
from types import SimpleNamespace

import named_vllm  # noqa: F401  # before verl
import ray
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}


class NamedError(Exception):
    """The server has told its workers what they need."""


class Server(vLLMHttpServer):
    def _init_config(self, config: object) -> object:
        raise NamedError


def addresses(session: str) -> tuple[str, str]:
    """Of sender and receiver in the first job of a cluster."""
    node = SimpleNamespace(session_name=session)
    context = SimpleNamespace(get_job_id=lambda: "01000000", worker=SimpleNamespace(node=node))
    ray.get_runtime_context = lambda: context
    sender = ServerAdapter(RolloutConfig(name="vllm"), SimpleNamespace(), None).zmq_handle
    try:
        Server(None, None, None, [], 0, 0, 1, 1, "")
    except NamedError:
        worker = SimpleNamespace(model_runner=None, local_rank=0)
        return sender, vLLMColocateWorkerExtension._get_zmq_handle(worker)
    raise RuntimeError("the server reads its configuration no more")


first, second = addresses("session_1"), addresses("session_2")
assert first[0] == first[1], f"sender and receiver are at {first}"
assert second[0] == second[1], f"sender and receiver are at {second}"
assert first != second, f"both clusters sync at {first[0]}"
