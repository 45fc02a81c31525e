"""verl's vLLM server without its `__init__`, which starts an engine, for scripts of behaviour/."""

from types import SimpleNamespace
from typing import Any

import named_vllm  # noqa: F401  # before verl
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


def bare_server(engine: Any, lora_rank: int) -> Any:
    """One over an engine, with what `generate` reads."""
    server = object.__new__(vLLMHttpServer)
    server.config = SimpleNamespace(
        max_model_len=64, response_length=8, prompt_length=8, full_determinism=False, custom=None, mtp=None,
        enable_rollout_routing_replay=False, get=lambda name, default: default,
    )  # fmt: skip
    server.model_config = SimpleNamespace(lora_rank=lora_rank, lora={}, processor=None)
    server.engine, server._submission_paused, server._admitting, server.global_steps = engine, False, 0, 0
    server._disaggregation_role, server._pd_decode_peers, server.replica_rank = None, (), 0
    return server
