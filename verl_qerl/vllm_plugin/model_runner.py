"""The two model runners of vLLM: V1, which we are made for, and V2, which it chooses for Qwen3, Llama and Mistral."""

from typing import Any

CHOICE = "VLLM_USE_V2_MODEL_RUNNER"  # of the environment


def is_v2(part: Any) -> bool:
    """Whether a model runner, or a part of one, is of V2."""
    return type(part).__module__.startswith("vllm.v1.worker.gpu.")
