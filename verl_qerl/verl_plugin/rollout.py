"""verl's vLLM replica with a server that adapts to our checkpoints and returns what its workers answer."""

import json
from types import ModuleType
from typing import Any

from verl_qerl.nvfp4.checkpoint import ignored_modules, quantization_config
from verl_qerl.nvfp4.stream import open_source


def install(module: ModuleType) -> None:
    """Have the rollout name `vllm` resolve to our replica. vLLM is imported by the process that asks for it only."""
    module.RolloutReplicaRegistry.register("vllm", _load_replica)


def _load_replica() -> type:
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class QerlServer(vLLMHttpServer):
        """vLLMHttpServer; stock behaviour unless `rollout.custom.qerl` is set."""

        async def collective_rpc(
            self,
            method: Any,
            timeout: float | None = None,
            args: tuple = (),
            kwargs: dict[str, Any] | None = None,
        ) -> list[Any]:
            """As verl's, with the result of every worker (patches/verl/0004)."""
            return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

        def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            if ((self.config.custom or {}).get("qerl") or {}).get("base") == "nvfp4":
                describe_checkpoint(engine_kwargs, self.model_config.local_path)

    class QerlReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(QerlServer)

    return QerlReplica


def describe_checkpoint(engine_kwargs: dict, path: str) -> None:
    """Tell vLLM which modules an NVFP4 directory left dense, instead of what nvfp4.yaml says of a bf16 one.

    Args:
        engine_kwargs: Changed in place.
        path: Of the model.
    """
    source = open_source(path)
    if source.layout == "bf16":
        return
    overrides = engine_kwargs.get("hf_overrides") or {}
    if isinstance(overrides, str):
        overrides = json.loads(overrides)
    described = quantization_config(ignored_modules(source.config))
    engine_kwargs["hf_overrides"] = {**overrides, "quantization_config": described}
