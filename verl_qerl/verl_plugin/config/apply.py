"""What the options of a run mean in verl's and vLLM's own nodes, written once, in one place.

On the driver before verl builds its dataclasses; where verl's check is not ours, by the trainer. The overlays in
verl_qerl/config/ set verl's own options alone, so that a command can set them anew; what is written here follows from
`+rollout`, `+qerl`, `+aqn` and `+uaq`.
"""

import logging
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_qerl import vllm_plugin
from verl_qerl.algos.acr import ACRConfig
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.algos.uaq import UAQConfig
from verl_qerl.options import rules
from verl_qerl.options.rules import ACTOR, FSDP, LORA_RANK, ROLLOUT, VLLM, Run
from verl_qerl.options.schema import Base, Qerl
from verl_qerl.verl_plugin.config.attention import check_attention, use_attention
from verl_qerl.verl_plugin.config.lengths import check_lengths, check_micro_batches, check_mini_batches
from verl_qerl.verl_plugin.config.nodes import mapping, run_of
from verl_qerl.verl_plugin.config.sequence_parallel import check_sharing
from verl_qerl.verl_plugin.config.spelling import check_spelling
from verl_qerl.verl_plugin.config.uses_qerl import uses_qerl
from verl_qerl.verl_plugin.config.values import check_groups, check_values
from verl_qerl.vllm_plugin import PREFIX
from verl_qerl.vllm_plugin.options import KEY, SCHEDULER

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "verl_qerl.verl_plugin.weight_sync.worker_extension.WorkerExtension"
_UNSET = object()
_LOADER = f"{VLLM}.model_loader_extra_config"
# What the driver writes there -> the option of `qerl.base` that it is.
_OF_LOADER = {"scale": "scale", "share_base": "share", "ignore": "ignore"}
APPLIED = f"{ROLLOUT}.custom.qerl"  # read by the rollout's server; also says that a run is prepared
# What the plan of the memory needs of other nodes (actor/memory_check.py).
_OF_THE_RUN = (
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.free_cache_engine",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "data.max_prompt_length",
    "data.max_response_length",
)
# Sizes for all GPUs together, which verl's checks take and its workers do not. Which of them a run reads is told by
# three switches for batches counted in tokens: one that it does not read changes nothing.
_OF_ALL_GPUS = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
)


def prepare(config: DictConfig) -> None:
    """Check a run and write what its options mean; one that is prepared stays as it is.

    Of a run without an option of ours, what the CPU platform cannot do is all that is looked at.

    Raises:
        RuntimeError: vLLM is of another version.
        ValueError: An option is unknown, out of range, or does not go together with the rest of the run.
    """
    run = run_of(config)
    if run(APPLIED) is not None:
        return
    if not uses_qerl(config):
        rules.check(run, rules.OF_THE_CPU)
        return
    check_groups(config)
    check_spelling(config)
    options, aqn, uaq = Qerl.from_mapping(run("qerl")), aqn_options(config), UAQConfig.from_mapping(run("uaq"))
    ACRConfig.from_mapping(run("acr"))
    if options.base.format is not None or aqn.enabled or run("qerl.rollout"):
        problem = vllm_plugin.version_problem()
        if problem:
            raise RuntimeError(problem)
    rules.check(run)
    rules.check_gpus(run)
    check_values(config)
    check_sharing(run)
    check_lengths(run)
    check_micro_batches(run)
    check_mini_batches(run)
    check_attention(config)
    if options.base.format is not None:
        _check_loader(run, options.base)
    _apply(config, options, aqn, uaq)


def aqn_options(config: DictConfig) -> AQNConfig:
    """The node `aqn` of a run; absent means off. A ValueError if an option is unknown or out of range."""
    return AQNConfig.from_mapping(run_of(config)("aqn"))


def _apply(config: DictConfig, options: Qerl, aqn: AQNConfig, uaq: UAQConfig) -> None:
    run = run_of(config)
    told = _told(run, aqn, uaq)  # the workers of the rollout
    with open_dict(config):
        _share_micro_batches(config, run)
        if options.base.format is not None:
            _hold_base(config, run, options)
        if uaq.enabled:
            node = OmegaConf.select(config, FSDP)
            node["_target_"], node["uaq_scale"] = rules.OUR_ENGINE, uaq.scale
        if told:
            _tell_workers(config, told)
        if aqn.enabled and aqn.draw != "batch":  # the scheduler keeps answers out of the prefix cache
            _set_default(config, f"{VLLM}.scheduler_cls", SCHEDULER)
        OmegaConf.update(config, APPLIED, {"base": options.base.format})
    use_attention(config)


def _share_micro_batches(config: DictConfig, run: Run) -> None:
    """Give each GPU its part of a micro-batch that is named for all of them, as in older examples of verl."""
    for name in _OF_ALL_GPUS:
        size, of_each = run(name), f"{name}_per_gpu"
        if size is None:
            continue
        OmegaConf.update(config, name, None)  # verl's default of a critic's `of_each` is this one
        if run(of_each) is not None:
            OmegaConf.update(config, name, size)  # verl says that both are set
            continue
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}={size} is no number of answers. Accepted is 1 or more. Set {of_each}.")
        OmegaConf.update(config, of_each, max(1, size // rules.num_gpus(run)))


def _check_loader(run: Run, base: Base) -> None:
    """Refuse with a ValueError options of the loader that the driver would write over with others."""
    given, written = mapping(run, _LOADER), _of_loader(base)
    for key, option in _OF_LOADER.items():
        if given.get(key) not in (None, written[key]):
            raise ValueError(
                f"{_LOADER}.{key}={given[key]} does not go together with qerl.base.{option}={written[key]}: the driver"
                f" writes +qerl.base.{option} there. Accepted is null. Set +qerl.base.{option}, for both sides."
            )


def _values(base: Base) -> dict[str, Any]:
    return asdict(base) | {"ignore": list(base.ignore)}


def _of_loader(base: Base) -> dict[str, Any]:
    values = _values(base)
    return {key: values[option] for key, option in _OF_LOADER.items()}


def _hold_base(config: DictConfig, run: Run, options: Qerl) -> None:
    """The actor's engine, and the loader and kernels of the rollout, get the same format and choices."""
    base, has_adapter = options.base, bool(run(LORA_RANK))
    if run(f"{FSDP}.model_dtype") is None:  # bf16 swallows small updates
        OmegaConf.update(config, f"{FSDP}.model_dtype", "bf16" if has_adapter else "fp32")
    held = _values(base) | {"has_adapter": has_adapter}
    held["run"] = {name.removeprefix("actor_rollout_ref."): run(name) for name in _OF_THE_RUN}
    kwargs: dict[str, Any] = {
        "load_format": f"{PREFIX}{base.format}",
        "quantization": f"{PREFIX}{base.format}",
        "model_loader_extra_config": {**mapping(run, _LOADER), **_of_loader(base)},
    }
    OmegaConf.update(config, f"{FSDP}.qerl", held)
    OmegaConf.update(config, VLLM, kwargs)


def _told(run: Run, aqn: AQNConfig, uaq: UAQConfig) -> dict[str, Any]:
    """`additional_config.verl_qerl` of the engines; empty where there is no work for a worker of ours."""
    found = dict(run("qerl.rollout") or {})
    if run("qerl.base.format") is not None:
        found["train_norms"] = bool(run("qerl.base.train_norms"))
    if aqn.enabled:
        found["aqn"] = asdict(aqn) | {"targets": aqn.targets and list(aqn.targets)}
        if uaq.enabled:  # noise must grow as much as the norms
            found["uaq_scale"] = uaq.scale
    return found


def _tell_workers(config: DictConfig, told: dict[str, Any]) -> None:
    given = mapping(run_of(config), f"{VLLM}.additional_config")
    OmegaConf.update(config, f"{VLLM}.additional_config", {**given, KEY: told})
    named = _set_default(config, f"{VLLM}.worker_extension_cls", WORKER_EXTENSION)
    if named != WORKER_EXTENSION:
        logger.warning(
            "verl_qerl: %s.worker_extension_cls=%s reads our options if it inherits from %s; else most of them do"
            " nothing.",
            VLLM,
            named,
            WORKER_EXTENSION,
        )


def _set_default(config: DictConfig, name: str, value: str) -> str | None:
    """The value that the run sets, which may be null; if it sets none, `value` is written and returned."""
    found = OmegaConf.select(config, name, default=_UNSET)
    if found is not _UNSET:
        return found
    OmegaConf.update(config, name, value)
    return value
