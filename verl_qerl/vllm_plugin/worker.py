"""The extension of vLLM's workers: it prepares the model, and adds methods such as `qerl_set_noise`.

vLLM appends an extension to the bases of its worker class, so that nothing here can override a method; what has to run
after loading is set on the instance.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import verl_qerl
from verl_qerl import upstream
from verl_qerl.vllm_plugin import NAMES, hosts
from verl_qerl.vllm_plugin.adapter.lora import compute_plain_logits, release_buffers, use_single_adapter
from verl_qerl.vllm_plugin.decode.attention import use_decode_attention
from verl_qerl.vllm_plugin.decode.elementwise import use_programmatic_launch
from verl_qerl.vllm_plugin.decode.memory_share import stay_within_share, use_segments_again
from verl_qerl.vllm_plugin.decode.sampling import use_fused_sampler
from verl_qerl.vllm_plugin.noise.noise_rows import NoiseRows, check_draws
from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise, check_model
from verl_qerl.vllm_plugin.noise.synced_norms import SyncedNorms
from verl_qerl.vllm_plugin.options import STOCK_LINEAR, RolloutOptions, asked_of_vllm, rollout_options
from verl_qerl.vllm_plugin.weights.borrowed import borrowed_by, is_borrowing
from verl_qerl.vllm_plugin.weights.linear import repacked_in_features

logger = logging.getLogger(__name__)

PREPARED = "verl_qerl_prepared"  # of additional_config, which vLLM's key of compiled code is made of


class RolloutWorkerExtension:
    """Prepares the model of a worker as `additional_config.verl_qerl` asks, with `aqn` for noise that can be set."""

    _qerl_noise: NormNoise | None
    _qerl_norms: SyncedNorms | None

    def __new__(cls, vllm_config: Any, **kwargs: Any) -> Any:
        """Create the worker; `load_model` will prepare the model."""
        instance = super().__new__(cls)
        prepare_model(instance, vllm_config)
        _refuse_deep_sleep(instance, vllm_config.load_config.load_format)
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
        """Call `NormNoise.sizes`; raises as `qerl_set_noise` too."""
        return _noise_of(self).sizes()

    def qerl_num_noisy(self) -> int:
        """Call `NormNoise.num_noisy`; raises as `qerl_set_noise`."""
        return _noise_of(self).num_noisy()


def _noise_of(worker: Any) -> NormNoise:
    if worker._qerl_noise is None:
        raise ValueError(
            "this engine was started without noise. Options of AQN go into additional_config.verl_qerl.aqn."
            " Start it with `+aqn.enabled=true`."
        )
    return worker._qerl_noise


def _make_noise(worker: Any, options: RolloutOptions) -> NormNoise:
    rows = NoiseRows(worker.model_runner, options.aqn.draw) if options.aqn.draw != "batch" else None
    model = worker.model_runner.get_model()
    noise = NormNoise(model, options.aqn, options.uaq_scale, rows and rows.give_tables)
    if rows is not None:
        rows.watch()
    return noise


def _watch_owner(worker: Any) -> None:
    """Compute no step with memory whose owner has ended."""
    borrowed: Any = borrowed_by(worker.model_runner.get_model())
    execute_model = worker.execute_model

    def check_then_execute(*args: Any, **kwargs: Any) -> Any:
        borrowed.check()
        return execute_model(*args, **kwargs)

    upstream.set_method(hosts.EXECUTE_MODEL, worker, check_then_execute)


def _refuse_microbatches(vllm_config: Any) -> None:
    """Keep packed linears and attention on one stream: their thread blocks exchange sums in one workspace a device."""
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        raise ValueError(
            "vLLM would run packed linears on two streams at once, which share a workspace for sums:"
            f" enable_dbo={parallel.enable_dbo}, ubatch_size={parallel.ubatch_size}. Accepted is one batch at a time,"
            f" or vLLM's own kernels. Leave these options out, or set {STOCK_LINEAR}."
        )


def _prepare_loaded(
    worker: Any, vllm_config: Any, options: RolloutOptions, lora_config: Any, told: dict[str, Any]
) -> None:
    """Prepare a model that is loaded.

    Args:
        lora_config: vLLM's, where LoRA goes on the path for one adapter; else None.
        told: What vLLM keeps compiled code apart by; gets what is ours.
    """
    model = worker.model_runner.get_model()
    if lora_config:
        compute_plain_logits(model)
        told["lora"] = use_single_adapter(model, lora_config)
    if options.aqn.enabled:
        worker._qerl_noise = _make_noise(worker, options)
    if is_borrowing(vllm_config):
        _watch_owner(worker)
    if options.train_norms:  # synced onto the noise
        worker._qerl_norms = SyncedNorms(model, worker._qerl_noise)
    columns = repacked_in_features(model)
    told["linear"] = sorted(columns)
    if columns:
        _refuse_microbatches(vllm_config)
        # vLLM fuses norms with the sums of several GPUs: its own, with weights of the activations' dtype.
        fused = vllm_config.compilation_config.pass_config.fuse_allreduce_rms
        use_programmatic_launch(model, columns, left=vllm_config.model_config.dtype if fused else None)
        if options.attention == "auto":
            use_decode_attention(model, vllm_config)
    if options.sampler != "stock":
        use_fused_sampler(worker.model_runner)


def prepare_model(worker: Any, vllm_config: Any) -> None:
    """Prepare a worker as its options ask, now and after `worker.load_model`.

    Raises:
        ValueError: An option is unknown, out of range, or does not go together with VLLM_BATCH_INVARIANT. After
            loading: draws of the noise do not fit the engine, or packed linears would run on two streams at once.
    """
    worker._qerl_noise = worker._qerl_norms = None
    options = _batch_invariant(rollout_options(vllm_config), vllm_config)
    check_draws(vllm_config, options.aqn)
    if options.aqn.enabled:
        check_model(vllm_config, options.aqn)
    lora_config = vllm_config.lora_config if options.lora == "single" else None
    told = _compile_apart(vllm_config)
    use_segments_again(worker, vllm_config)
    stay_within_share(worker, vllm_config)
    load_model = worker.load_model

    def load_then_prepare(*args: Any, **kwargs: Any) -> None:
        with _releasing_buffers(worker, lora_config):
            load_model(*args, **kwargs)
        _prepare_loaded(worker, vllm_config, options, lora_config, told)

    upstream.set_method(hosts.LOAD_MODEL, worker, load_then_prepare)


def _batch_invariant(options: RolloutOptions, vllm_config: Any) -> RolloutOptions:
    """Leave to vLLM what must not depend on the batch: our adapters, sampler and attention do, by a rounding."""
    asked = asked_of_vllm(vllm_config)
    if asked != "VLLM_BATCH_INVARIANT=1":
        return options
    if options.aqn.enabled:
        raise ValueError(
            f"noise does not go together with {asked}: vLLM's norms take weights in bf16 alone there, and noise keeps"
            " them in float32. Accepted is VLLM_BATCH_INVARIANT=0, in a run of verl rollout.full_determinism=False. Set"
            " it, or leave +aqn.enabled out."
        )
    logger.warning("verl_qerl: LoRA, the sampler and attention stay vLLM's: %s, and ours depend on the batch.", asked)
    return replace(options, lora="stock", sampler="stock", attention="stock")


def _compile_apart(vllm_config: Any) -> dict[str, Any]:
    """Keep code that is compiled here apart from stock vLLM's; returns the part of vLLM's cache key that is ours.

    Without it an engine would run what another has compiled with the same options, in which our layers are missing.
    """
    prepared: dict[str, Any] = {"version": verl_qerl.__version__}
    options = {**(vllm_config.additional_config or {}), PREPARED: prepared}
    upstream.set_data(hosts.ADDITIONAL_CONFIG, vllm_config, additional_config=options)
    return prepared


@contextlib.contextmanager
def _releasing_buffers(worker: Any, lora_config: Any) -> Iterator[None]:
    """Free buffers of LoRA that the path for one adapter leaves unused, in the memory that sleep mode keeps weights in.

    So it happens while the runner loads; its method stays as it is without LoRA.
    """
    if not lora_config:
        yield
        return
    runner = worker.model_runner
    load_model = runner.load_model

    def load_then_release(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        release_buffers(runner.get_model(), lora_config)

    upstream.set_method(hosts.LOAD_IN_POOL, runner, load_then_release)
    try:
        yield
    finally:
        upstream.reset_method(hosts.LOAD_IN_POOL, runner)


def _refuse_deep_sleep(worker: Any, load_format: str) -> None:
    """Keep weights that nothing brings back: a loader of ours has none for vLLM's reload; verl's workers get theirs."""
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

    upstream.set_method(hosts.SLEEP, worker, sleep_lightly)
