"""verl's configuration classes with our options, and the checks that need the whole configuration.

With an adapter the actor's base is packed and frozen, without one the actor trains all weights and the rollout's are
quantized at every sync. nvfp4.yaml makes `QerlFSDPEngineConfig` the target of `actor.fsdp_config` and hands it, by
interpolation, the values of other nodes that it must agree with. verl builds it on the driver before Ray starts: bad
input is refused there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.config import FSDPEngineConfig

from verl_qerl import verl_plugin, vllm_plugin
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.algos.options import read_options
from verl_qerl.formats import DEFAULT_FORMAT, FORMATS, WeightFormat, scaled_format
from verl_qerl.formats.ignore import DEFAULT_IGNORE, ignore_rules
from verl_qerl.verl_plugin.config.attention import default_attention
from verl_qerl.verl_plugin.config.nodes import plain
from verl_qerl.verl_plugin.config.sequence_parallel import check_sequence_parallel

# Keys under which the actor's digests, what is where in a flat adapter, and the adapter's checksum travel with its
# configuration.
DIGESTS = "verl_qerl_base_digests"
LAYOUT = "verl_qerl_adapter_layout"
CHECKSUM = "verl_qerl_adapter_checksum"


@dataclass(frozen=True)
class BaseOptions:
    """How weights are held: `actor_rollout_ref.actor.fsdp_config.qerl`.

    Attributes:
        format: Of the rollout's linears, and of the actor's frozen base: nvfp4, mxfp4, int8 or fp8.
        scale: Scale choice of nvfp4 where model.path is not quantized yet: mse, its default, or minmax.
        ignore: Modules left in bf16: exact names, or `re:` and a regular expression.
        fused_lora: Compute adapter and base linear as one function, q, k, v and gate, up together; else as PEFT does.
        shard_base: Spread the packed base over the ranks; a layer is gathered while it computes. nvfp4 only, as are
            share_base and train_norms.
        share_base: Keep one copy of the packed base a GPU: the rollout computes with the actor's memory.
        keep_dense: Hold a bf16 copy of the base while the actor computes, where memory allows.
        train_norms: Train the two norms of each layer besides the adapter.
        agrees_with: Values of other nodes, filled by nvfp4.yaml; see `_check_run` and memory_check.py.
    """

    format: str = "nvfp4"
    scale: str | None = None
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    fused_lora: bool = True
    shard_base: bool = False
    share_base: bool = False
    keep_dense: bool = False
    train_norms: bool = False
    agrees_with: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: One is out of range or does not go together with the rest of the configuration.
        """
        choices = FORMATS.get(self.format, DEFAULT_FORMAT).scale_choices
        if self.scale is None:
            object.__setattr__(self, "scale", choices[0])
        for name, found, accepted in (("format", self.format, tuple(FORMATS)), ("scale", self.scale, choices)):
            if found not in accepted:
                raise ValueError(
                    f"unknown {name} choice: actor.fsdp_config.qerl.{name}={found!r}."
                    f" Accepted are {', '.join(accepted)} with +rollout={self.format}. Choose one of them."
                )
        for name in ("fused_lora", "shard_base", "share_base", "keep_dense", "train_norms"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"no switch: actor.fsdp_config.qerl.{name}={getattr(self, name)!r}. Accepted are true and false."
                    " Choose one of them."
                )
        packed = [name for name in ("shard_base", "share_base", "keep_dense") if getattr(self, name)]
        if packed and not self.has_adapter:
            raise ValueError(
                f"actor.fsdp_config.qerl.{packed[0]}=True has no effect: without an adapter there is no packed base."
                " Accepted is False. Leave it out, or set model.lora_rank."
            )
        if self.train_norms and not self.has_adapter:
            raise ValueError(
                "actor.fsdp_config.qerl.train_norms=True has no effect: without an adapter all weights are trained,"
                " norms among them. Accepted is False. Leave it out, or set model.lora_rank."
            )
        alone = [name for name in ("shard_base", "share_base", "train_norms") if getattr(self, name)]
        if alone and self.format != "nvfp4":
            raise ValueError(
                f"actor.fsdp_config.qerl.{alone[0]}=True does not go together with +rollout={self.format}: it is built"
                " for NVFP4 alone. Accepted is False, or +rollout=nvfp4. Leave it out."
            )
        if self.shard_base and self.keep_dense:
            raise ValueError(
                "actor.fsdp_config.qerl.keep_dense=True does not go together with shard_base=True: a rank that holds"
                " a part of the base cannot keep a copy of the whole. Accepted is one of them. Leave one out."
            )
        if self.share_base:
            self._check_shared()
        object.__setattr__(self, "ignore", ignore_rules(self.ignore))
        _check_run(self.agrees_with, self.format, self.has_adapter)

    def _check_shared(self) -> None:
        tensor_parallel = self.agrees_with.get("rollout.tensor_model_parallel_size", 1)
        if self.shard_base or tensor_parallel != 1:
            other = "shard_base=True" if self.shard_base else f"rollout.tensor_model_parallel_size={tensor_parallel}"
            raise ValueError(
                f"actor.fsdp_config.qerl.share_base=True does not go together with {other}: both sides must hold the"
                " whole base on each GPU. Accepted are shard_base=False and tensor_model_parallel_size=1. Change one of"
                " them."
            )

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained on a frozen base; else all weights are, and each sync quantizes them."""
        return bool(self.agrees_with.get("model.lora_rank", 1))

    @property
    def weight_format(self) -> WeightFormat:
        """The format, with its options."""
        return scaled_format(self.format, self.scale)


@dataclass
class ScaledFSDPEngineConfig(FSDPEngineConfig):
    """FSDPEngineConfig with the scale of UAQ, which the trainer sets.

    Attributes:
        uaq_scale: s by which the engine scales what it loads; None leaves the weights as model.path has them.
    """

    uaq_scale: float | None = None


@dataclass
class QerlFSDPEngineConfig(ScaledFSDPEngineConfig):
    """FSDPEngineConfig with `qerl`; the engine packs the base, or quantizes what it sends, when it is given one.

    `model_dtype` null is bf16 for what is frozen, and fp32 where all weights train: bf16 swallows small updates.
    """

    qerl: Any = None

    def __post_init__(self) -> None:
        """Check versions, registration and values.

        Raises:
            RuntimeError: Our side of verl is not registered.
            ValueError: A value is out of range.
        """
        super().__post_init__()
        if verl_plugin.FAILURE is not None:
            raise RuntimeError(f"verl_qerl cannot be used: {verl_plugin.FAILURE}")
        problem = vllm_plugin.version_problem()
        if problem:
            raise RuntimeError(problem)
        if not isinstance(self.qerl, BaseOptions):
            object.__setattr__(self, "qerl", _base_options(self.qerl))
        moved = [name for name in ("param_offload", "offload_policy") if getattr(self, name)]
        if self.qerl.share_base and moved:
            raise ValueError(
                f"actor.fsdp_config.qerl.share_base=True does not go together with {moved[0]}=True: the rollout"
                " computes with the memory that would be given back. Accepted is False. Leave one of them out."
            )
        if self.qat.enable:
            raise ValueError(
                f"actor.fsdp_config.qat.enable=True does not go together with +rollout={self.qerl.format}: both"
                " quantize the rollout's weights. Accepted is False. Leave one of them out."
            )
        self._check_sequence_parallel(self.qerl.agrees_with)
        if self.model_dtype is None:
            object.__setattr__(self, "model_dtype", "bf16" if self.qerl.has_adapter else "fp32")

    def _check_sequence_parallel(self, run: Mapping[str, Any]) -> None:
        older_name = run.get("actor.ulysses_sequence_parallel_size", 1)  # wins in verl where it is set
        if "model.attn_implementation" in run:
            check_sequence_parallel(
                older_name if older_name > 1 else self.ulysses_sequence_parallel_size,
                run["model.attn_implementation"] or default_attention(),
                run["model.use_remove_padding"],
                run["trainer.n_gpus_per_node"] * run["trainer.nnodes"],
            )


def aqn_options(config: DictConfig) -> AQNConfig:
    """The top-level `aqn` node of a run; absent means off.

    Raises:
        ValueError: An option is unknown or out of range, or the trainer has no noise.
    """
    found = AQNConfig.from_mapping(plain(OmegaConf.select(config, "aqn")))
    if found.enabled and not OmegaConf.select(config, "trainer.use_v1", default=True):
        raise ValueError(
            "trainer.use_v1=False does not go together with aqn.enabled=true. Accepted is True: verl's first trainer"
            " knows no AQN. Leave the option out."
        )
    return found


def _base_options(node: Any) -> BaseOptions:
    where = "actor.fsdp_config.qerl"
    return read_options(BaseOptions, where, plain(node), f"actor_rollout_ref.{where}.scale=mse")


# Option, whether its value is accepted, what is, and what to do.
_Rule = tuple[str, Callable[[Any], bool], str, str]
_RULES: tuple[_Rule, ...] = (
    ("rollout.name", lambda v: v == "vllm", "vllm", "Set actor_rollout_ref.rollout.name=vllm."),
    ("actor.strategy", lambda v: v == "fsdp2", "fsdp2", "Set actor_rollout_ref.actor.strategy=fsdp2."),
    (
        "model.lora.merge",
        lambda v: not v,
        "False",
        "An adapter cannot be merged into quantized weights: leave the option out.",
    ),
    (
        "rollout.load_format",
        lambda v: "dummy" not in str(v),
        "any format but dummy",
        "verl would send bf16 weights: leave the option out.",
    ),
    (
        "rollout.quantization",
        lambda v: v is None,
        "null",
        "The rollout is quantized by `+rollout=...`: leave the option out.",
    ),
    ("rollout.dtype", lambda v: v == "bfloat16", "bfloat16", "Leave the option out."),
    ("rollout.pipeline_model_parallel_size", lambda v: v == 1, "1", "Use tensor_model_parallel_size."),
    ("trainer.use_v1", bool, "True", "Leave the option out."),
    (
        "trainer.v1.trainer_mode",
        lambda v: v in ("sync", "colocate_async"),
        "sync or colocate_async",
        "Other modes send whole models.",
    ),
)
_WITH_ADAPTER: tuple[_Rule, ...] = (
    (
        "actor.checkpoint.save_contents",
        lambda v: "hf_model" not in v,
        "a list without hf_model",
        "verl would write the model without its packed weights: leave it out and use `python -m verl_qerl export`.",
    ),
)
_NO_ADAPTER = "verl's FSDP engine makes an adapter where model.lora_rank says so: set model.lora_rank."
_WITHOUT_ADAPTER: tuple[_Rule, ...] = (
    ("model.lora.rank", lambda v: not v, "0", _NO_ADAPTER),
    ("model.lora_adapter_path", lambda v: not v, "null", _NO_ADAPTER),
)


def _check_run(run: dict[str, Any], form: str, has_adapter: bool) -> None:
    """Refuse combinations in which weights would be overwritten, merged, sent as they are, never used or not saved."""
    more, beside = (_WITH_ADAPTER, "an adapter") if has_adapter else (_WITHOUT_ADAPTER, "model.lora_rank=0")
    for rules, others in ((_RULES, f"+rollout={form}"), (more, f"+rollout={form} and {beside}")):
        for name, accepts, accepted, remedy in rules:
            if name in run and not accepts(run[name]):
                raise ValueError(
                    f"{name}={run[name]} does not go together with {others}. Accepted is {accepted}. {remedy}"
                )
    AQNConfig.from_mapping(run.get("aqn"))
    gpus, shared = run.get("trainer.n_gpus_per_node"), run.get("rollout.tensor_model_parallel_size", 1)
    if gpus is not None and (gpus * run["trainer.nnodes"]) % shared:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={shared} does not divide the {gpus * run['trainer.nnodes']} GPUs of"
            f" the run (trainer.n_gpus_per_node={gpus}, trainer.nnodes={run['trainer.nnodes']}). Accepted are divisors"
            " of it. Set actor_rollout_ref.rollout.tensor_model_parallel_size=1, or use more GPUs."
        )
