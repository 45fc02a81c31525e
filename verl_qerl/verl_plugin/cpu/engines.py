"""verl's FSDP engines on the CPU platform, which it registers for GPUs alone."""

from types import ModuleType

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_qerl import upstream
from verl_qerl.verl_plugin.shims import CRITIC


def install(module: ModuleType) -> None:
    """Register verl's own engines of language models and of critics; a second call does nothing."""
    upstream.install(CRITIC)
    registered = EngineRegistry._engines
    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        if "cpu" not in registered[kind]["fsdp2"]:
            EngineRegistry.register(kind, ["fsdp", "fsdp2"], "cpu")(engine)
