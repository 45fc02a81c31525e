"""How much GPU memory a run takes, phase by phase, from shapes alone.

Two sums are kept apart. What is held is exact: weights, adapters, optimizer, what vLLM is told to take. What passes
need besides is an estimate of one layer's tensors. A configuration is refused on what is held alone.
"""

from dataclasses import dataclass

from verl_qerl.planning.model_shape import ModelShape

GIB = 2**30
# CUDA context, libraries and graphs of a process beside its tensors; vLLM's while it sleeps.
_CONTEXT_BYTES = 1.0 * GIB
_ASLEEP_BYTES = 2.0 * GIB
# CUDA graphs, NCCL and libraries of vLLM, which its share leaves out, beyond its context: by the 7B and 32B steps of
# tests/bench/results/h200 whose KV cache keeps to its share, measured before it left room for the graphs there.
_BEYOND_SHARE_BYTES = 1.25 * GIB
# Codes and block scales; what a channel or a whole weight has besides is left out.
BYTES_PER_WEIGHT = {"nvfp4": 9 / 16, "mxfp4": 17 / 32, "int8": 1.0, "fp8": 1.0}
_HEAD_CHUNK = 1024  # tokens, as kernels.actor.log_probs


class DoesNotFitError(ValueError):
    """What a run certainly holds is more than there is."""


@dataclass(frozen=True)
class Settings:
    """What of a run's configuration decides its memory.

    Attributes:
        adapted_features: Inputs and outputs of the linears that carry one; None: of all (with experts, of the
            attention's).
        gpus: Over which FSDP2 shards.
        tokens: Most tokens of a micro-batch: its limit with dynamic batch sizes, else its answers at full length.
        checkpointing: Whether layers are computed again in the backward pass.
        whole_logits: The head's logits of a micro-batch exist at once (`use_fused_kernels=False`).
        shard_base, share_base: `qerl.base.shard` and `qerl.base.share`.
        param_offload, optimizer_offload, offload_policy: As in fsdp_config; the packed base goes with the first alone.
        utilization: rollout.gpu_memory_utilization; 0: no rollout on these GPUs.
        sleeps: Whether the rollout gives its memory back (`rollout.free_cache_engine`).
        format: Format of the packed base, a key of `BYTES_PER_WEIGHT`.
        ignore: Modules left in bf16, as `qerl.base.ignore`. Of experts none is; head and embedding are without it too.
    """

    rank: int
    adapted_features: int | None = None
    gpus: int = 1
    tokens: int = 8192
    checkpointing: bool = True
    whole_logits: bool = False
    shard_base: bool = False
    share_base: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    utilization: float = 0.0
    tensor_parallel: int = 1
    sleeps: bool = True
    format: str = "nvfp4"
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class Phase:
    """One phase of a step on one GPU.

    Attributes:
        held: name -> bytes that are certainly taken.
        estimated: name -> bytes of passes.
    """

    name: str
    held: dict[str, float]
    estimated: dict[str, float]

    @property
    def certain(self) -> float:
        """Bytes below which the phase cannot run."""
        return sum(self.held.values())

    @property
    def total(self) -> float:
        """Bytes it is expected to take."""
        return self.certain + sum(self.estimated.values())


def plan(shape: ModelShape, settings: Settings, gpu_bytes: float) -> tuple[Phase, Phase]:
    """Memory of (rollout, update) on each GPU.

    Raises:
        DoesNotFitError: The rollout is given less than its weights take.
        ValueError: Experts are to be anything but NVFP4 and whole.
    """
    if shape.experts and (settings.format != "nvfp4" or settings.shard_base or settings.share_base):
        raise ValueError(
            f"no plan for a mixture of experts with format={settings.format}, qerl.base.shard={settings.shard_base} and"
            f" qerl.base.share={settings.share_base}: actor and rollout each hold it whole, in nvfp4. Leave these out."
        )
    s, actor = settings, _actor(shape, settings)
    weights = rollout_weights(shape, s)
    if s.utilization and weights > s.utilization * gpu_bytes:
        raise DoesNotFitError(
            f"too little GPU memory for the configuration: vLLM's weights take {weights / GIB:.1f} GiB on each GPU, and"
            f" rollout.gpu_memory_utilization={s.utilization} of {gpu_bytes / GIB:.1f} GiB gives it"
            f" {s.utilization * gpu_bytes / GIB:.1f}. More than its weights is accepted. Raise it, or"
            " rollout.tensor_model_parallel_size."
        )
    rollout_held = {"vLLM": s.utilization * gpu_bytes}
    if not s.param_offload:
        rollout_held |= {name: size for name, size in actor.items() if name != "optimizer"}
    if not s.optimizer_offload:
        rollout_held["optimizer"] = actor["optimizer"]
    beside = {"contexts": 2 * _CONTEXT_BYTES, "vLLM beyond its share": _BEYOND_SHARE_BYTES if s.utilization else 0.0}
    update_held = {**actor, "gradients": actor["adapters"]}
    if s.utilization and not s.sleeps:
        update_held["vLLM"] = rollout_held["vLLM"]
    asleep = _ASLEEP_BYTES if s.utilization and s.sleeps else 0.0
    update = Phase("update", update_held, {**passes(shape, s), "vLLM asleep": asleep, "contexts": _CONTEXT_BYTES})
    return Phase("rollout", rollout_held, beside), update


def rollout_weights(shape: ModelShape, s: Settings) -> float:
    """Bytes of vLLM's own weights on each GPU; a shared base is the actor's, and counted there."""
    packed = 0 if s.share_base else _packed(shape, s)
    return (packed + 2 * (sum(shape.left_in_bf16(s.ignore)) + shape.head_weights)) / s.tensor_parallel


def _packed(shape: ModelShape, s: Settings) -> float:
    return (shape.packed_weights - sum(shape.left_in_bf16(s.ignore))) * BYTES_PER_WEIGHT[s.format]


def _actor(shape: ModelShape, s: Settings) -> dict[str, float]:
    packed, dense = _packed(shape, s), sum(shape.left_in_bf16(s.ignore))
    features = shape.adapted_features if s.adapted_features is None else s.adapted_features
    kept = 0 if s.offload_policy else 1  # on the host, also while the actor trains
    adapter = kept * s.rank * features / s.gpus
    return {
        "packed base": packed / (s.gpus if s.shard_base else 1),
        **({"linears in bf16": kept * 2 * dense / s.gpus} if dense else {}),
        "embedding and head": kept * 2 * shape.head_weights / s.gpus,
        "adapters": 4 * adapter,
        "optimizer": 8 * adapter,
    }


def passes(shape: ModelShape, s: Settings) -> dict[str, float]:
    """What forward and backward of one micro-batch hold besides weights: an estimate."""
    t, saved = s.tokens, [s.tokens * size for size in shape.saved_bytes()]
    dense = shape.left_in_bf16(s.ignore)
    found: dict[str, float] = {}
    if s.checkpointing:
        found["checkpoints"] = 2.0 * t * shape.hidden * shape.layers
        found["one layer"] = max(saved) + 2 * (shape.decoded_weights - min(dense))
    else:
        found["all layers"] = sum(saved) + 2 * shape.largest_linear
    if s.gpus > 1 or s.offload_policy:
        gathered = 2 * shape.head_weights + 2 * 2 * max(dense)  # of this layer and the next
        if s.shard_base:
            gathered += 2 * (shape.layer_weights - min(dense)) * 9 // 16
        found["gathered"] = gathered
    # Five times bf16: verl's copies of whole logits; of a chunk what torch's passes hold, where our kernel holds less.
    found["logits"] = 10.0 * shape.vocabulary * (t if s.whole_logits else min(t, _HEAD_CHUNK))
    return found


def check(phases: tuple[Phase, ...], gpu_bytes: float) -> None:
    """Refuse with a DoesNotFitError a phase that certainly holds more than the GPU has."""
    for phase in phases:
        if phase.certain > gpu_bytes:
            parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in phase.held.items() if size)
            raise DoesNotFitError(
                f"too little GPU memory for the configuration: the {phase.name} holds {phase.certain / GIB:.1f} GiB"
                f" ({parts}). The GPU's {gpu_bytes / GIB:.1f} GiB are accepted. Lower rollout.gpu_memory_utilization,"
                " use more GPUs with +qerl.base.shard=true, or offload the actor."
            )


def verdict(phases: tuple[Phase, ...], gpu_bytes: float) -> tuple[bool, str]:
    """Whether a run that `check` accepts is expected to fit, and a line that says so."""
    fullest = max(phases, key=lambda phase: phase.total)
    spare = (gpu_bytes - fullest.total) / GIB
    if spare >= 0:
        return True, f"fits by the estimate, {spare:.1f} GiB to spare in the {fullest.name}"
    return False, (
        f"does not fit by the estimate: the {fullest.name} takes {-spare:.1f} GiB more than there is."
        " Lower rollout.gpu_memory_utilization or the tokens of a micro-batch, offload, or use more GPUs with"
        " +qerl.base.shard=true."
    )


def table(phases: tuple[Phase, ...], gpu_bytes: float) -> str:
    """Lines for a terminal: each part in GiB, estimates marked."""
    lines = []
    for phase in phases:
        lines.append(f"{phase.name}: {phase.total / GIB:.1f} of {gpu_bytes / GIB:.1f} GiB")
        for mark, parts in (("", phase.held), (" (estimate)", phase.estimated)):
            lines += [f"  {name}: {size / GIB:.2f}{mark}" for name, size in parts.items() if size]
    return "\n".join(lines)
