"""verl's vLLM replica, with a server that reads our checkpoints and returns the answers of its workers."""

import logging
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ray

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import left_out
from verl_qerl.formats import get_format
from verl_qerl.verl_plugin.config.apply import WORKER_EXTENSION
from verl_qerl.verl_plugin.config.nodes import mapping
from verl_qerl.verl_plugin.rollout.engine_scores import SCORING
from verl_qerl.vllm_plugin.decode.final_outputs import FinalOutputs
from verl_qerl.vllm_plugin.decode.graph_sizes import VLLMS, larger_sizes
from verl_qerl.vllm_plugin.options import KEY as OPTIONS
from verl_qerl.vllm_plugin.options import V2_CHOICE, asked_of_vllm

if TYPE_CHECKING:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer as _Server
else:
    _Server = object  # mixed into verl's, whose import brings vLLM

logger = logging.getLogger(__name__)

# Ray calls this group beside the requests, however many wait for their turn.
_HEALTH = "verl_qerl_health"


def install(module: ModuleType) -> None:
    """Make the rollout name `vllm` resolve to our replica and to our sender of its weights.

    vLLM is imported only by a process that asks for it.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    module.RolloutReplicaRegistry.register("vllm", _load_replica)
    _ROLLOUT_REGISTRY["vllm", "async"] = "verl_qerl.verl_plugin.weight_sync.server_adapter.QerlServerAdapter"


def _load_replica() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    server = _load_server()
    remote: Any = ray.remote  # its overloads for type checkers lack the groups

    class QerlReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = remote(concurrency_groups={_HEALTH: 1})(server)

    return QerlReplica


class ServerMethods(_Server):
    """What our server has beside verl's methods, or in their place: see each."""

    engine: Any
    _final_outputs: FinalOutputs | None = None

    @property
    def qerl_base(self) -> str | None:
        """Name of the rollout's weight format; None if the format is not ours."""
        return ((self.config.custom or {}).get("qerl") or {}).get("base")

    @ray.method(concurrency_group=_HEALTH)
    def qerl_ended(self) -> bool:
        """Whether vLLM's engine has ended, which its server outlives."""
        return self.engine.errored

    async def qerl_clear_kv_cache(self) -> None:
        """Clear the cache as verl's clear_kv_cache does, also while requests run: there vLLM clears nothing silently.

        Running requests lose no token: vLLM puts them back into its queue and computes their keys and values again.

        Raises:
            RuntimeError: vLLM has kept some blocks.
        """
        await self.clear_kv_cache()
        if not await self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError(
                "vLLM did not clear its prefix cache: reset_prefix_cache=False. Accepted is True: what follows would"
                " read keys and values of other weights. Look for the reason in its log above."
            )

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> Any:
        """Generate as verl's server does, with one output for the whole answer if the weight format is ours."""
        if self._final_outputs is None:
            return await super().generate(prompt_ids, sampling_params, request_id, **more)
        with self._final_outputs.asking(request_id, sampling_params) as params:
            return await super().generate(prompt_ids, params, request_id, **more)

    async def _park_until_admitted(self, request_id: str) -> Any:
        """Let scoring in while requests of training wait: verl shuts the door when it aborts those in flight."""
        if not request_id.startswith(SCORING):
            return await super()._park_until_admitted(request_id)
        self._admitting += 1  # verl's `generate` counts it off again
        return None


def _load_server() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from verl_qerl.verl_plugin.rollout.adapter_listing import AdapterListing
    from verl_qerl.verl_plugin.weight_sync.run_name import ENV, run_name

    class QerlServer(ServerMethods, vLLMHttpServer):
        """vLLMHttpServer with sockets and adapter lists of ours; the rest is stock without `rollout.custom.qerl`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.environ[ENV] = run_name()  # launch_server starts the engine, which inherits it

        async def run_server(self, args: Any) -> None:
            await super().run_server(args)
            AdapterListing(self.engine)
            self._final_outputs = FinalOutputs(self.engine) if self.qerl_base else None

        async def collective_rpc(
            self, method: Any, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> list[Any]:
            """Return the result of every worker, which verl's method drops (patches/verl/0004)."""
            return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

        def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            if engine_kwargs.get("worker_extension_cls") == WORKER_EXTENSION:
                choose_runner()
            if self.qerl_base is not None:
                describe_checkpoint(engine_kwargs, self.model_config.local_path, self.qerl_base)
                if self.model_config.lora_rank:
                    cover_batches(engine_kwargs, self.config)

    return QerlServer


def choose_runner() -> None:
    """Make the engines of this process run vLLM's V1 model runner, unless the environment names one.

    vLLM 0.24.0 would run Qwen3, Llama and Mistral on its V2 runner, which does not take our sampler.
    """
    if V2_CHOICE not in os.environ:
        os.environ[V2_CHOICE] = "0"
        logger.info("verl_qerl: %s=0, for the sampler of ours; 1 is vLLM's other runner.", V2_CHOICE)


def cover_batches(engine_kwargs: dict, config: Any) -> None:
    """Capture CUDA graphs for every batch size up to `max_num_seqs`; vLLM's own list ends at 512.

    With vLLM's LoRA kernels the list stays vLLM's: it reserves 30 GiB for larger graphs there that they do not fill
    (7B; tests/bench/results/h200/rollout_7b_1024.json).

    Args:
        engine_kwargs: Arguments of an engine with an adapter. Changed in place unless the user chose the sizes.
    """
    ours = mapping(engine_kwargs.get, "additional_config").get(OPTIONS) or {}
    several = engine_kwargs.get("max_loras", 1) != 1  # verl sets 1
    if ours.get("lora") == "stock" or several or asked_of_vllm(None):
        return
    compilation = mapping(engine_kwargs.get, "compilation_config")
    named = {*compilation, *engine_kwargs} & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    if config.enforce_eager or config.cudagraph_capture_sizes or named:
        return
    at_once = (engine_kwargs.get(name) or getattr(config, name) for name in ("max_num_seqs", "max_num_batched_tokens"))
    larger = larger_sizes(min(at_once))
    if larger:
        engine_kwargs["compilation_config"] = {**compilation, "cudagraph_capture_sizes": [*VLLMS, *larger]}


def describe_checkpoint(engine_kwargs: dict, path: str, form: str = "nvfp4") -> None:
    """Tell vLLM how the linears of the rollout are quantized, and which modules are not.

    Args:
        engine_kwargs: Changed in place. The modules left out are those that a packed directory names or holds
            unpacked, and for a bf16 one those of `model_loader_extra_config`.

    Raises:
        CheckpointFormatError: The model is stored in another format, or this one does not hold its experts.
    """
    chosen = get_format(form)
    of_the_run = (engine_kwargs.get("model_loader_extra_config") or {}).get("ignore")
    overrides = mapping(engine_kwargs.get, "hf_overrides")
    described = chosen.config(left_out(open_source(path), chosen, of_the_run))
    engine_kwargs["hf_overrides"] = {**overrides, "quantization_config": described}
