"""Methods that vLLM's workers gain: `collective_rpc("qerl_set_noise", ...)`.

vLLM appends an extension to the bases of its worker class, so that nothing here can override a method; what has to run
after loading is hung on the instance.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import verl_qerl
from verl_qerl.kernels.rollout import launch
from verl_qerl.vllm_plugin import NAMES
from verl_qerl.vllm_plugin.adapter.lora import compute_plain_logits, release_buffers, use_single_adapter
from verl_qerl.vllm_plugin.decode.attention import use_decode_attention
from verl_qerl.vllm_plugin.decode.elementwise import use_programmatic_launch
from verl_qerl.vllm_plugin.decode.memory_share import can_sleep, stay_within_share, use_segments_again
from verl_qerl.vllm_plugin.decode.sampling import use_fused_sampler
from verl_qerl.vllm_plugin.noise.noise_rows import NoiseRows, check_draws
from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise, check_model
from verl_qerl.vllm_plugin.noise.synced_norms import SyncedNorms
from verl_qerl.vllm_plugin.options import RolloutOptions, asked_of_vllm, rollout_options
from verl_qerl.vllm_plugin.weights.borrowed import borrowed_by, is_borrowing
from verl_qerl.vllm_plugin.weights.head import quantize_head
from verl_qerl.vllm_plugin.weights.linear import repacked_in_features

logger = logging.getLogger(__name__)

_Step = Callable[[torch.nn.Module], Any]
PREPARED = "verl_qerl_prepared"  # of additional_config, which vLLM's key of compiled code is made of


class NoiseWorkerExtension:
    """Adds noise to a worker whose `additional_config.verl_qerl.aqn` holds the options of AQNConfig."""

    _qerl_noise: NormNoise | None
    _qerl_norms: SyncedNorms | None

    def __new__(cls, **kwargs: Any) -> Any:
        """Create the worker; `load_model` will prepare the model."""
        instance = super().__new__(cls)
        prepare_model(instance, kwargs.get("vllm_config"))
        _refuse_deep_sleep(instance, kwargs.get("vllm_config"))
        return instance

    def qerl_set_noise(self, sigma: float, step: int) -> tuple[int, int]:
        """Give every target norm fresh noise; `reset_prefix_cache` must follow.

        Args:
            sigma: Standard deviation, 0 to restore.
            step: Training step, part of the seed.

        Returns:
            Number of norms set, and a checksum of their weights.

        Raises:
            ValueError: The engine was started without noise.
        """
        noise = _noise_of(self)
        return noise.apply(sigma, step), noise.checksum()

    def qerl_norm_sizes(self) -> dict[str, float]:
        """As `NormNoise.sizes`; errors also as `qerl_set_noise`."""
        return _noise_of(self).sizes()

    def qerl_num_noisy(self) -> int:
        """As `NormNoise.num_noisy`; errors as `qerl_set_noise`."""
        return _noise_of(self).num_noisy()

    def qerl_norm_weights(self) -> dict[str, torch.Tensor]:
        """Name -> present float32 weight on the CPU, to look at."""
        held = [norms for norms in (self._qerl_noise, self._qerl_norms) if norms is not None]
        norms = {name: norm for one in held for name, norm in one._norms.items()}
        return {name: norm.weight.detach().cpu().clone() for name, norm in norms.items()}


def _noise_of(worker: Any) -> NormNoise:
    if worker._qerl_noise is None:
        raise ValueError(
            "this engine was started without noise. Options of AQN go into additional_config.verl_qerl.aqn."
            " Start it with `+aqn.enabled=true`."
        )
    return worker._qerl_noise


def prepare_model(worker: Any, vllm_config: Any) -> None:
    """Do what the options ask for, now or after `worker.load_model`.

    LoRA goes on the path for one adapter, norms are prepared for noise and for syncs, weights stay where they are
    during sleep and the KV cache within the worker's share, the head is quantized, the sampler replaced. What lies
    between linears on our kernels goes on our kernels too.

    Raises:
        ValueError: An option is unknown or out of range or does not go together with VLLM_BATCH_INVARIANT, or later
            the head cannot be quantized or the sampler replaced, or draws of the noise do not fit the engine.
    """
    worker._qerl_noise = worker._qerl_norms = None
    options = _batch_invariant(rollout_options(vllm_config), vllm_config)
    check_draws(vllm_config, options.aqn)
    if options.aqn.enabled:
        check_model(vllm_config, options.aqn)
    launch.programmatic_launch = options.programmatic_launch
    if options.keep_base_resident:
        _keep_weights(worker, vllm_config)
    use_segments_again(worker, vllm_config)
    stay_within_share(worker, vllm_config)
    lora_config = getattr(vllm_config, "lora_config", None) if options.lora == "single" else None
    borrows = is_borrowing(vllm_config)
    prepared = _compile_apart(vllm_config)
    load_model = worker.load_model
    in_pool: list[_Step] = [quantize_head] if options.lm_head == "fp8" else []
    in_pool += [lambda model: release_buffers(model, lora_config)] if lora_config is not None else []

    def load_then_prepare(*args: Any, **kwargs: Any) -> None:
        with _ending_with(worker.model_runner, in_pool) if in_pool else contextlib.nullcontext():
            load_model(*args, **kwargs)
        # Before anything is compiled, and outside of the sleep-mode pool: what stays readable while the engine sleeps.
        model = worker.model_runner.get_model()
        if lora_config is not None:
            compute_plain_logits(model)
            prepared["lora"] = use_single_adapter(model, lora_config)
        if options.aqn.enabled:
            rows = NoiseRows(worker.model_runner, options.aqn.draw) if options.aqn.draw != "batch" else None
            worker._qerl_noise = NormNoise(model, options.aqn, options.uaq_scale, rows)
            if rows is not None:
                rows.watch()
        if borrows:
            _watch_owner(worker, model)
        if options.train_norms:
            worker._qerl_norms = SyncedNorms(model, worker._qerl_noise)
        columns = repacked_in_features(model)
        prepared["linear"] = sorted(columns)
        if columns:
            # vLLM fuses norms with the sums of several GPUs: its own, with weights of the activations' dtype.
            fused = vllm_config.compilation_config.pass_config.fuse_allreduce_rms
            use_programmatic_launch(model, columns, left=vllm_config.model_config.dtype if fused else None)
            if options.attention == "auto":
                use_decode_attention(model, vllm_config)
        if options.sampler != "stock":
            use_fused_sampler(worker.model_runner, required=options.sampler == "fused")

    worker.load_model = load_then_prepare


def _batch_invariant(options: RolloutOptions, vllm_config: Any) -> RolloutOptions:
    """Leave to vLLM what must not depend on the batch: our adapters, sampler and attention do, by a rounding."""
    asked = asked_of_vllm(vllm_config)
    if asked != "VLLM_BATCH_INVARIANT=1":
        return options
    for name, value in (("sampler", "fused"), ("lm_head", "fp8")):
        if getattr(options, name) == value:
            raise ValueError(
                f"additional_config.verl_qerl.{name}={value!r} does not go together with {asked}: its results depend"
                " on the batch. Accepted is the default. Leave one of them out."
            )
    logger.warning("verl_qerl: LoRA, the sampler and attention stay vLLM's: %s, and ours depend on the batch.", asked)
    return replace(options, lora="stock", sampler="stock", attention="stock")


def _compile_apart(vllm_config: Any) -> dict[str, Any]:
    """Have what is compiled here kept apart from stock vLLM's, by what this returns: vLLM asks when it compiles.

    Without it an engine runs what another has compiled of the same options, in which our layers are missing.
    """
    prepared: dict[str, Any] = {"version": verl_qerl.__version__}
    if vllm_config is not None:
        vllm_config.additional_config = {**(vllm_config.additional_config or {}), PREPARED: prepared}
    return prepared


def _watch_owner(worker: Any, model: torch.nn.Module) -> None:
    """Compute no step with memory whose owner has ended."""
    borrowed: Any = borrowed_by(model)
    execute_model = worker.execute_model

    def check_then_execute(*args: Any, **kwargs: Any) -> Any:
        borrowed.check()
        return execute_model(*args, **kwargs)

    worker.execute_model = check_then_execute


@contextlib.contextmanager
def _ending_with(runner: Any, steps: list[_Step]) -> Iterator[None]:
    """Take steps on what is loaded meanwhile, in the memory that sleep mode keeps weights in."""
    load_model = runner.load_model

    def load_then_take_steps(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        for step in steps:
            step(runner.get_model())

    runner.load_model = load_then_take_steps
    try:
        yield
    finally:
        del runner.load_model


def _refuse_deep_sleep(worker: Any, vllm_config: Any) -> None:
    """Keep weights that nothing brings back: a loader of ours has none for vLLM's reload; verl's workers get theirs."""
    load_format = getattr(getattr(vllm_config, "load_config", None), "load_format", None)
    if load_format not in NAMES:
        return
    sleep = worker.sleep

    def sleep_lightly(level: int = 1) -> None:
        if level > 1:
            raise ValueError(
                f"weights of load_format={load_format} cannot be loaded again: sleep(level={level}) drops them."
                " Accepted is level 1, which keeps them on the host. Use it."
            )
        sleep(level)

    worker.sleep = sleep_lightly


def _keep_weights(worker: Any, vllm_config: Any) -> None:
    """Allocate weights, and LoRA's buffers with them, outside of the memory that sleep mode unmaps."""
    if not can_sleep(vllm_config):
        logger.warning("verl_qerl: keep_base_resident changes nothing: sleep mode is off, so that weights never leave.")
        return
    pool = worker._maybe_get_memory_pool_context

    def pool_of_the_cache(tag: str) -> Any:
        return contextlib.nullcontext() if tag == "weights" else pool(tag)

    worker._maybe_get_memory_pool_context = pool_of_the_cache
