"""Options of the rollout: `additional_config.verl_qerl`, vLLM's door for options of a plugin."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.algos.options import read_options

KEY = "verl_qerl"
SCHEDULER = "verl_qerl.vllm_plugin.decode.scheduler.scheduler"  # for vLLM's scheduler_cls
_CHOICES = {
    "linear": ("auto", "stock"),
    "lora": ("single", "stock"),
    "lm_head": ("bf16", "fp8"),
    "sampler": ("auto", "fused", "stock"),
    "attention": ("auto", "stock"),
}


@dataclass(frozen=True)
class RolloutOptions:
    """What our side of vLLM does.

    Attributes:
        aqn: Options of the noise.
        linear: `auto` chooses a kernel by the number of rows, and has norms, activations and rotary
            positions of ours beside them; `stock` is vLLM's (Marlin).
        lora: `single` is the path for one adapter, `stock` vLLM's for many.
        lm_head: `fp8` rounds the output head to E4M3, a scale a token of the vocabulary; the actor's stays in bf16.
        sampler: `fused` draws from the whole distribution in one pass over the logits, with other random numbers than
            vLLM's; what it does not take (greedy, top-k, top-p, seeds of requests) stays with vLLM's. `auto` is
            `fused` on a GPU where vLLM's sampler can be replaced.
        attention: `auto` has a kernel of ours attend where each sequence gets one token, beside linears of ours;
            `stock` is vLLM's FlashAttention.
        programmatic_launch: In CUDA graphs our kernels load weights while the kernel before them still runs
            (programmatic dependent launch). For the whole process.
        resident: Keep a bf16 copy of the packed linears beside them (two bytes a weight) for batches at which a 4-bit
            kernel is slower; without it those are decoded when they are used.
        keep_base_resident: A sleeping engine gives up its KV cache alone. Otherwise vLLM copies its weights to the host
            whenever it falls asleep, and back when it wakes.
        uaq_scale: s of UAQ, by which the actor's norms are larger than those that the noise is meant for.
        train_norms: The actor trains the two norms of each layer, and syncs bring them with the adapter.
    """

    aqn: AQNConfig
    linear: str = "auto"
    lora: str = "single"
    lm_head: str = "bf16"
    sampler: str = "auto"
    attention: str = "auto"
    programmatic_launch: bool = True
    resident: bool = False
    keep_base_resident: bool = False
    uaq_scale: float = 1.0
    train_norms: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: One is not among its choices.
        """
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"unknown choice: additional_config.{KEY}.{name}={getattr(self, name)!r}. Accepted are"
                    f" {', '.join(choices)}. Choose one of them."
                )
        for name in ("programmatic_launch", "resident", "keep_base_resident", "train_norms"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"not a switch: additional_config.{KEY}.{name}={getattr(self, name)!r}. Accepted are true and"
                    " false. Choose one of them."
                )


def rollout_options(vllm_config: Any) -> RolloutOptions:
    """The options of an engine; absent ones have their defaults.

    Args:
        vllm_config: vLLM's, or None.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    additional: Mapping[str, Any] = getattr(vllm_config, "additional_config", None) or {}
    options: Any = additional.get(KEY) or {}
    if isinstance(options, Mapping):
        options = {**options, "aqn": AQNConfig.from_mapping(options.get("aqn"))}
    return read_options(RolloutOptions, f"additional_config.{KEY}", options, f'{{"{KEY}": {{"lora": "stock"}}}}')


def asked_of_vllm(vllm_config: Any) -> str | None:
    """The setting by which the user says which of vLLM's kernels to use, so that ours are not meant; or None."""
    from vllm import envs  # a driver may have none

    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1"
    backend = getattr(getattr(vllm_config, "kernel_config", None), "linear_backend", "auto")
    return None if backend == "auto" else f"linear_backend={backend!r}"
