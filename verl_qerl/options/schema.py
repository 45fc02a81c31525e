"""The tree of options under `+qerl`: names, defaults, accepted values and what they mean.

`+aqn`, `+acr` and `+uaq` are beside their algorithms (algos/). The tables of verl_plugin/README.md are made of this.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from verl_qerl.algos.options import SWITCH, Accepts, Options, is_names, is_number, one_of, option
from verl_qerl.formats import DEFAULT_FORMAT, FORMATS
from verl_qerl.formats.ignore import DEFAULT_IGNORE, is_ignored

# Default of gate.max_initial_kl where both sides multiply by the same dense weights: what a 105 M parameter model loses
# in NVFP4 is 0.02 to 0.04 (a pretrained one of 135 M 0.19), so that weights wrong by as much do not pass.
SAME_WEIGHTS_KL = 0.02
# Default of gate.max_kl is so many times gate.max_initial_kl.
LATER_STEPS = 5


_LIMIT = Accepts(
    "a number above 0, or null for no limit", lambda value: value is None or (is_number(value) and 0 < value < math.inf)
)


@dataclass(frozen=True)
class Base(Options):
    """How weights are held: of the rollout's linears, and of the actor's frozen base under an adapter."""

    NODE: ClassVar[str] = "qerl.base"

    format: str | None = option(
        None,
        Accepts(", ".join(FORMATS), lambda value: value in (None, *FORMATS)),
        "set by `+rollout=...`: the format of the rollout's linears, and of the actor's frozen base under an adapter",
    )
    scale: str | None = option(
        None,
        Accepts("mse, minmax, null", lambda value: value in (None, *DEFAULT_FORMAT.scale_choices)),
        "scale choice of nvfp4 for a bf16 model.path: mse, its default (of each block the scale with the least squared"
        " error, [why](../../tests/bench/results/README.md#scales-of-nvfp4)), or minmax (as QeRL); a packed one has"
        " its own, beside which this is refused",
    )
    ignore: tuple[str, ...] = option(
        DEFAULT_IGNORE,
        Accepts(
            "a list of exact names, or of `re:` and a regular expression, such as [lm_head,'re:.*[qkv]_proj']", is_names
        ),
        "modules left in bf16: a list of exact names or `re:` and a regular expression; one that names no module is"
        " refused, and so is a part of q, k and v or of gate and up, which vLLM runs as one linear. A packed model.path"
        " says itself what it left out, and this is refused beside it",
    )
    train_norms: bool = option(
        False,
        SWITCH,
        "train `input_layernorm` and `post_attention_layernorm` of every layer besides the adapter, as QeRL's scripts"
        " do; see [Trained norms](../README.md#trained-norms)",
    )
    shard: bool = option(
        False,
        SWITCH,
        "on several GPUs, each holds a part of the packed base and gathers a layer's bytes while it computes; same"
        " bits, LoRA checkpoints resume either way",
    )
    share: bool = option(
        False,
        SWITCH,
        "one copy of the packed base on a GPU: the rollout maps the actor's memory (CUDA IPC) and has that much more"
        " for its KV cache; for less memory lower `gpu_memory_utilization` with it",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ignore", tuple(self.ignore))
        for rule in self.ignore:
            is_ignored("", (rule,))  # its sentence about what is no regular expression
        choices = FORMATS[self.format].scale_choices if self.format is not None else ()
        if choices and self.scale not in (None, *choices):
            raise self._refused("scale", f"{', '.join(choices)}, with +rollout={self.format}")


@dataclass(frozen=True)
class Rollout(Options):
    """Which kernels of the rollout are ours."""

    NODE: ClassVar[str] = "qerl.rollout"

    linear: str = option(
        "auto",
        one_of("auto", "stock"),
        "on Hopper, a kernel of ours for up to 512 to 8,192 rows, by the size of the linear, decoding and cuBLAS"
        " beyond; other GPUs and shapes stay on Marlin and say so. Norms over the hidden size, SiLU-and-multiply and"
        " the rotation of q and k, with the norms of their heads in Qwen3, go on kernels of ours too. `stock`: vLLM's"
        " Marlin linears, norms and activations",
    )
    lora: str = option(
        "single",
        one_of("single", "stock"),
        "the path for one adapter (`max_loras` 1), for bf16 rollouts too. Ranks 8, 16, 32, 64 and 128 share the"
        " linear's launch, others take two of their own. `stock`: vLLM's",
    )
    sampler: str = option(
        "auto",
        one_of("auto", "stock"),
        "on a GPU tokens are drawn in one pass over the logits, two with log-probs (vLLM's"
        " sampler makes about eight over a float32 copy), from other random numbers than vLLM's and as reproducible."
        " For whole distributions at any temperature, with the log-probs that verl asks for; greedy, top-k, top-p,"
        " penalties and seeds of requests stay with vLLM's, which says so once."
        " `stock`: vLLM's",
    )
    attention: str = option(
        "auto",
        one_of("auto", "stock"),
        "beside linears of ours, a kernel of ours attends where each sequence gets one token, and puts keys and values"
        " into the cache in the same launch: heads of 64 or 128 columns, up to eight of q on one of k and v, a cache in"
        " bf16. Prompts stay with vLLM's FlashAttention, as do layers with a sliding window, sinks or a soft cap, which"
        " the log says once. `stock`: FlashAttention alone",
    )


@dataclass(frozen=True)
class Gate(Options):
    """The comparison of actor and rollout: limits of KL(rollout || actor), and the parts of the difference.

    The default lies far above sound rollouts and below wrong bits (figures: verl_plugin/README.md): it stops garbage,
    not small errors, and nothing on an untrained model, whose tokens are all about as likely.
    """

    NODE: ClassVar[str] = "qerl.gate"

    max_initial_kl: float | None = option(
        0.05,
        _LIMIT,
        "nats per token, 0.02 by default on nvfp4 and mxfp4; a first step (also after a resume) with KL(rollout \\|\\|"
        " actor) above it stops the run before any update. It is the KL without noise and, where the rollout is"
        " quantized at every sync, with the actor's linears rounded alike. null: never",
    )
    max_kl: float | None = option(
        0.25,
        _LIMIT,
        "the same for later steps, five times `max_initial_kl` by default: the first step above it is a warning, the"
        " second in a row stops the run. It looks at answers that the present weights began: in `colocate_async` with"
        " `num_warmup_batches` at its default of 1 there may be none in a later step, which is warned of once. null, or"
        " in `separate_async`: never",
    )
    mismatch_sample: int = option(
        0,
        Accepts("a number of sequences, 0 for none", lambda value: type(value) is int and value >= 0),
        "sequences of each step whose difference between actor and rollout is taken apart",
    )


@dataclass(frozen=True)
class Qerl(Options):
    """The whole tree; its nodes may be given as mappings."""

    NODE: ClassVar[str] = "qerl"

    base: Base = Base()
    rollout: Rollout = Rollout()
    gate: Gate = Gate()

    def __post_init__(self) -> None:
        for each in fields(self):
            node, kind = getattr(self, each.name), type(getattr(Qerl, each.name))
            if not isinstance(node, kind):
                object.__setattr__(self, each.name, kind.from_mapping(node))
