"""What verl lacks and a wrapper can supply. Shims stand down once their patch in patches/ is applied, all but one."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from verl_qerl import upstream
from verl_qerl.kernels.actor.log_probs import log_probs_of_labels


def _gloo_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Name the CPU once: verl's default backend on a CPU platform is "cpu:gloo,cpu:gloo", which torch refuses."""

    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name  # listing the shims must not import verl

        if backend is None and get_device_name() == "cpu":
            backend = "gloo"
        original(timeout_second=timeout_second, backend=backend)

    return initialize_global_process_group_ray


def _float32_log_probs(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take log-probs of half-precision logits in float32 and in chunks.

    verl takes one token at a time, some kernels each; in float32 under autocast on a GPU, in bf16 on a CPU.
    """

    def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.dtype in (torch.float32, torch.float64):
            return original(logits, labels)
        return log_probs_of_labels(logits, labels)

    return logprobs_from_logits_v2


def _float32_entropy(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take entropies of half-precision logits in float32: autocast does so on a GPU and leaves bf16 on a CPU."""

    def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
        return original(logits if logits.dtype == torch.float64 else logits.float())

    return entropy_from_logits


def _looked_at(original: Callable[..., None]) -> Callable[..., None]:
    """Let the driver look at the configuration first (driver.py), which verl asks no registered policy loss about."""

    def validate_config(config: Any, use_reference_policy: bool, use_critic: bool) -> None:
        from verl_qerl.verl_plugin.driver import look_at

        look_at(config, use_critic)
        original(config=config, use_reference_policy=use_reference_policy, use_critic=use_critic)

    return validate_config


def _watched_sending(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a sender of weights notice that its receiver has gone: verl's waits for an answer without a limit."""

    def _init_socket(self: Any) -> None:
        from verl_qerl.verl_plugin.weight_sync.transfer import WatchedSender

        original(self)
        self.socket = WatchedSender(self.socket)

    return _init_socket


def _attention_of_critic(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load a critic with the attention of its configuration: verl's loads with flash-attn, whatever was chosen."""

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        if model_config._attn_implementation == "flash_attention_2":
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    return load_valuehead_model


_shim = partial(upstream.Shim, versions="==0.9.1")

PROCESS_GROUP = _shim(
    target="verl.utils.distributed:initialize_global_process_group_ray",
    fingerprint="761a94d1a2e0",
    patched="75c43fbe0859",
    patch="verl/0002",
    wrap=_gloo_on_cpu,
)
# In force where the engine has options of ours; with flash-attn verl does not get there.
LOG_PROBS = _shim(
    target="verl.utils.torch_functional:logprobs_from_logits_v2",
    fingerprint="1074be97faf3",
    patched="473b1706eaf4",
    patch="verl/0006",
    wrap=_float32_log_probs,
)
ENTROPY = _shim(
    target="verl.utils.torch_functional:entropy_from_logits",
    fingerprint="f69d6578eeb3",
    patched="daa4c2e5f67d",
    patch="verl/0006",
    wrap=_float32_entropy,
)
# In force everywhere, with the patch too: it decides whether anything else of ours is (driver.py).
CONFIG_CHECK = _shim(
    target="verl.utils.config:validate_config",
    fingerprint="ab4096deecfe",
    patched="f62545372c47",
    patch="verl/0007",
    wrap=_looked_at,
    bindings=("verl.utils",),
)
# In force where an actor has a rollout to send to.
SENDING = _shim(
    target="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender._init_socket",
    fingerprint="23603b065142",
    patched="3cee14a9074f",
    patch="verl/0017",
    wrap=_watched_sending,
)
# In force in runs of ours and on the CPU platform.
CRITIC = _shim(
    target="verl.utils.model:load_valuehead_model",
    fingerprint="2371ca280654",
    patched="f0a831d1649f",
    patch="verl/0018",
    wrap=_attention_of_critic,
)
SHIMS: tuple[upstream.Shim, ...] = (PROCESS_GROUP, LOG_PROBS, ENTROPY, CONFIG_CHECK, SENDING, CRITIC)
# Module of verl -> the shim that the CPU platform needs there.
OF_THE_CPU = {"verl.utils.distributed": PROCESS_GROUP, "verl.utils.torch_functional": ENTROPY}


def install(module: ModuleType) -> None:
    """Install the shim of a module on the CPU platform, before an engine binds it; raises as `upstream.install`."""
    upstream.install(OF_THE_CPU[module.__name__])
