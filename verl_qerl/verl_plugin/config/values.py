"""Values of verl's own options that verl takes, and that end a run minutes later or mean something else.

Text where verl has a number or a switch (`no` would be true), numbers that no run has, and words that verl does not
know: a checkpoint of `[modle]` would hold no weights.
"""

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import verl
from omegaconf import DictConfig, OmegaConf
from verl.utils.torch_dtypes import BFLOAT_LIST, FLOAT_LIST, HALF_LIST
from verl.utils.tracking import Tracking

from verl_qerl.algos.options import Accepts, is_number, one_of, refusal
from verl_qerl.options.rules import ACTOR, CORRECTION, FSDP, LOSS_MODE, MODEL, ROLLOUT, SYNC_MODES, Run, trains_critic
from verl_qerl.verl_plugin.config.nodes import run_of

# With all of verl's defaults.
_FILE = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
# Where verl has a number and takes text too: a range as `0.5_2.0`; sizes of stores of others.
_TEXT_TOO = (f"{CORRECTION}.rollout_is_threshold", "transfer_queue.backend.")
_COUNT = Accepts("a whole number above 0", lambda value: type(value) is int and value > 0)
_SHARE = Accepts("a number above 0, up to 1", lambda value: is_number(value) and 0 < value <= 1)
_SIZES = (
    *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", f"{ACTOR}.ppo_mini_batch_size"),
    *(f"{ROLLOUT}.{name}" for name in ("n", "val_kwargs.n", "agent.num_workers", "tensor_model_parallel_size")),
)
# Values without which verl makes no data set, no engine or no step.
_NEEDED = (
    *("data.train_batch_size", "data.train_max_samples", "data.val_max_samples", *_SIZES),
    *("trainer.test_freq", "trainer.resume_mode", "trainer.logger", f"{ROLLOUT}.gpu_memory_utilization"),
    f"{ACTOR}.optim.lr",
)
# Estimators of advantages that need what verl's V1 trainer gives to none.
_NOT_FED = ("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")
# Where older verl had options of `reward`: main_ppo takes them and reads none, so that another reward is trained on.
_UNREAD = ("custom_reward_function.", "reward_model.", "sandbox_fusion.")
# Groups of options that verl reads in every run; null is left to it for the others.
_READ = (
    *("trainer", "trainer.v1", "trainer.v1.sampler", "global_profiler", "data.custom_cls"),
    *("reward.custom_reward_function", MODEL, f"{MODEL}.lora", f"{MODEL}.mtp", ROLLOUT),
    *(f"{ACTOR}.optim", f"{ACTOR}.policy_loss", FSDP),
    *(
        f"{ROLLOUT}.{name}"
        for name in ("val_kwargs", "agent", "multi_turn", "checkpoint_engine", "disaggregation", "prometheus")
    ),
)
_OF_CRITIC = ("critic.model", "critic.optim", "critic.fsdp")


def _words(*known: str) -> Accepts:
    def test(value: Any) -> bool:
        words = [value] if isinstance(value, str) else value  # verl takes one word alone too
        return isinstance(words, list) and all(word in known for word in words)

    return Accepts(f"a list of {', '.join(known)}", test)


# What verl's trainer hands to its function.
_OF_CORRECTION = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)
_CONTENTS = _words("model", "optimizer", "extra", "hf_model")
_COUNTS = (
    *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")),
    *("trainer.total_training_steps", *_SIZES, f"{ACTOR}.ppo_epochs", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    *(f"{ROLLOUT}.{name}" for name in ("max_model_len", "max_num_seqs", "log_prob_micro_batch_size_per_gpu")),
    *(f"{ROLLOUT}.{name}" for name in ("data_parallel_size", "max_num_batched_tokens")),
)
# Where verl raises an error without text at the first update, or in the workers.
_DTYPES = (*HALF_LIST, *FLOAT_LIST, *BFLOAT_LIST)
_KL = one_of(*(f"{kind}{end}" for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+")))
_BETAS = Accepts(
    "two numbers in [0, 1)",
    lambda value: (
        isinstance(value, list) and len(value) == 2 and all(is_number(each) and 0 <= each < 1 for each in value)
    ),
)
_TOP_K = Accepts("-1 for all tokens, or a whole number of them", lambda value: type(value) is int and value >= -1)
_ACCEPTED = dict.fromkeys(_COUNTS, _COUNT) | {
    f"{ROLLOUT}.gpu_memory_utilization": _SHARE,
    f"{ROLLOUT}.top_p": _SHARE,
    f"{ROLLOUT}.val_kwargs.top_p": _SHARE,
    f"{ROLLOUT}.top_k": _TOP_K,
    f"{ROLLOUT}.val_kwargs.top_k": _TOP_K,
    f"{ACTOR}.optim.betas": _BETAS,
    f"{FSDP}.model_dtype": Accepts("bf16, fp16, fp32", _DTYPES.__contains__),
    f"{ACTOR}.kl_loss_type": _KL,
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_ctrl.type": one_of("fixed", "adaptive"),
    "trainer.logger": _words(*Tracking.supported_backend, "tracking"),
    "trainer.resume_mode": one_of("auto", "disable", "resume_path"),
    f"{ROLLOUT}.temperature": Accepts("a number above 0, up to 2", lambda value: is_number(value) and 0 < value <= 2),
    f"{ROLLOUT}.val_kwargs.temperature": Accepts(
        "a number from 0 to 2", lambda value: is_number(value) and 0 <= value <= 2
    ),
    f"{ACTOR}.checkpoint.save_contents": _CONTENTS,
    f"{ACTOR}.checkpoint.load_contents": _CONTENTS,
}


def check_groups(config: DictConfig) -> None:
    """Refuse with a ValueError a value in the place of a group of options; null only where the run reads the group."""
    run = run_of(config)
    for name, options in _no_groups(_defaults(), OmegaConf.to_container(config)):
        value = run(name)  # may be an interpolation
        if value is None and name not in _READ and not (name in _OF_CRITIC and trains_critic(run)):
            continue
        if not isinstance(value, dict):
            example = next((option for option in options if not option.startswith("_")), "NAME")
            raise ValueError(
                f"{name}={'null' if value is None else value} is no group of options, which verl has there. Accepted"
                f" are options such as `{name}.{example}=...`. Leave it out, and set them one by one."
            )


def _no_groups(known: dict[str, Any], given: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Groups of verl's for which a run has something else, each with verl's own options."""
    for key, options in known.items():
        if isinstance(options, dict) and key in given:
            if isinstance(given[key], dict):
                yield from _no_groups(options, given[key], f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", options


def check_values(config: DictConfig) -> None:
    """Refuse such values with a ValueError; null is left to verl, but where it has to be a name or one of _NEEDED."""
    given, names, run = dict(_leaves(OmegaConf.to_container(config))), _names(config), run_of(config)
    for name, value in given.items():
        if value and name.startswith(_UNREAD):
            raise ValueError(
                f"{name}={value!r} has no effect: this verl reads the options of rewards below `reward` alone. Accepted"
                " is null. Set the option there, as in reward.custom_reward_function.path, and leave this one out."
            )
    for name, accepts in (_accepted() | names).items():
        value = given.get(name)
        if isinstance(value, str | list):  # may be an interpolation
            value = run(name)
        if name in given and (value is not None or name in (*names, *_NEEDED)) and not accepts.test(value):
            raise refusal(name, value, accepts.told)
    _check_correction(run)


def _check_correction(run: Run) -> None:
    """Have verl's own function read what is set of the rollout's correction, of a token on which both sides agree."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    given = {name: value for name in _OF_CORRECTION if (value := run(f"{CORRECTION}.{name}")) is not None}
    token = torch.zeros(1, 1)
    try:
        compute_rollout_correction_and_rejection_mask(token, token, torch.ones_like(token), **given)
    except (TypeError, ValueError) as error:
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"{CORRECTION} with {told} ends the run once there are answers. verl says: {error} Correct the options."
        ) from error


def _names(config: DictConfig) -> dict[str, Accepts]:
    """Names that verl looks up after the first answers; a module of the user's may add others in the workers."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    if OmegaConf.select(config, f"{MODEL}.external_lib") or os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        return {}
    estimators = [name for name in ADV_ESTIMATOR_REGISTRY if name not in _NOT_FED]
    return {
        LOSS_MODE: one_of(*POLICY_LOSS_REGISTRY),
        "algorithm.adv_estimator": one_of(*estimators),
        "trainer.v1.trainer_mode": one_of(*SYNC_MODES, "separate_async"),
    }


@functools.cache
def _defaults() -> Any:
    found: Any = OmegaConf.to_container(OmegaConf.load(_FILE), resolve=True)
    found["actor_rollout_ref"]["rollout"]["custom"] = {}  # which verl's class has, and the file does not
    return found


def default_of(name: str) -> Any:
    """The value that verl gives an option, by its dotted name; None where it gives none."""
    return dict(_leaves(_defaults())).get(name)


@functools.cache
def _accepted() -> dict[str, Accepts]:
    found = {}
    for name, default in _leaves(_defaults()):
        if isinstance(default, int | float) and not name.startswith(_TEXT_TOO):
            told = "true, false" if isinstance(default, bool) else "a number"
            found[name] = Accepts(told, lambda value: isinstance(value, int | float) and not math.isnan(value))
    return _ACCEPTED | found | _ACCEPTED  # first what others may be interpolations of


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
