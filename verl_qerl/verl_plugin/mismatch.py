"""The rollout against the actor: metrics of every step, and a gate at the first one (`+qerl.max_initial_kl`).

Both log-probs of the sampled tokens are there once verl has computed `old_log_probs`, which is before any update. So a
rollout that is not the actor's model stops the run at its first step, also at the first after a resume. In the metrics
`rollout` is the model as it sampled, noise included (`aqn/sigma` says how much) and as old as its answers are. With
`+qerl.mismatch_sample` the sentence that stops a run says what the difference is made of. A rollout whose log-probs are
not finite stops a run at any step: a correction by them (TIS, ACR) would go into the loss.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_qerl.algos.mismatch import (
    SAME_WEIGHTS_KL,
    Mismatch,
    MismatchConfig,
    Undefined,
    rollout_mismatch,
    undefined_log_probs,
)
from verl_qerl.algos.mismatch_parts import PARTS
from verl_qerl.verl_plugin.config import aqn_options
from verl_qerl.verl_plugin.nodes import plain
from verl_qerl.verl_plugin.requantize import requantizes

logger = logging.getLogger(__name__)

NODE = "qerl"
_EXACT = ("nvfp4", "mxfp4")  # formats whose dense weights are bf16: actor and rollout multiply by the same ones
# Option, its default, and the values with which the log-probs of both policies can be compared.
_NEEDS = (
    ("actor_rollout_ref.rollout.calculate_log_probs", True, (True,)),
    ("algorithm.rollout_correction.bypass_mode", False, (False,)),  # takes the rollout's log-probs for the actor's
    ("trainer.use_v1", True, (True,)),  # verl's first trainer has no gate
)
# With others the rollout's log-probs are of what is left of the distribution, scaled up to 1: sound models differ by
# what was cut, which the gate would take for an error.
_GATE_NEEDS = (
    ("actor_rollout_ref.rollout.top_p", 1.0, (1.0,)),
    ("actor_rollout_ref.rollout.top_k", -1, (-1, 0)),
)
# The same for `mismatch_sample`: the rollout engine scores given tokens at temperature 1 and over the whole vocabulary.
_PARTS_NEED = (
    ("actor_rollout_ref.rollout.name", "vllm", ("vllm",)),
    ("actor_rollout_ref.rollout.temperature", 1.0, (1.0,)),
    *_GATE_NEEDS,
    ("trainer.v1.trainer_mode", "sync", ("sync", "colocate_async")),
)
# What to do about a difference, by the part that most of it is.
_CHECK_WEIGHTS = "Check that both have the same weights and versions"
_REMEDIES = {
    "quantization": "The format is too coarse for these weights: choose another `+rollout=...`",
    "noise": "Lower aqn.sigma_start",
}


def gate_options(config: DictConfig) -> MismatchConfig | None:
    """Options of a run; None where it neither sets them nor has a rollout of ours.

    Args:
        config: Of the whole run.

    Raises:
        ValueError: An option is unknown, out of range, or set where the log-probs cannot be compared.
    """
    options = plain(OmegaConf.select(config, NODE))
    gate = MismatchConfig.from_mapping(options)
    obstacle, cut = obstacle_of(config), _first_of(_GATE_NEEDS, config)
    if (obstacle or cut) and (options or {}).get("max_initial_kl") is not None:
        raise _unfit(obstacle or cut, f"max_initial_kl={gate.max_initial_kl}")
    if gate.mismatch_sample:
        obstacle = obstacle or _first_of(_PARTS_NEED, config)
        if obstacle:
            raise _unfit(obstacle, f"mismatch_sample={gate.mismatch_sample}")
    base = OmegaConf.select(config, "actor_rollout_ref.rollout.custom.qerl.base")
    if cut:
        gate = replace(gate, max_initial_kl=None)
    elif "max_initial_kl" not in (options or {}) and base in _EXACT and not requantizes(config):
        gate = replace(gate, max_initial_kl=SAME_WEIGHTS_KL)
    return gate if options is not None or base is not None or aqn_options(config).enabled else None


def obstacle_of(config: DictConfig) -> str | None:
    """The setting that keeps a run from comparing the two, with what is accepted; None where nothing does."""
    return _first_of(_NEEDS, config)


def _first_of(needs: Sequence[tuple[str, Any, tuple]], config: DictConfig) -> str | None:
    for name, default, accepted in needs:
        found = OmegaConf.select(config, name, default=default)
        if found not in accepted:
            return f"{name}={found} (accepted is {' or '.join(map(str, accepted))})"
    return None


def _unfit(obstacle: str | None, option: str) -> ValueError:
    return ValueError(
        f"{obstacle} does not go together with qerl.{option}, which compares the log-probs of the rollout with those of"
        " the actor. Leave out one of the two."
    )


if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # mixed into whichever trainers verl has


class MismatchMixin(_Trainer):
    """Hooks of verl's PPOTrainer; does nothing unless one of our options is set."""

    def __init__(self, config: DictConfig) -> None:
        gate, obstacle = gate_options(config), obstacle_of(config)
        if gate is not None and obstacle is not None:
            logger.warning("the gate at the first step cannot look, and qerl/rollout_* are not logged: %s.", obstacle)
        elif gate is not None and (cut := _first_of(_GATE_NEEDS, config)):
            logger.warning("the gate at the first step does not look, and qerl/rollout_* contain the cut of %s.", cut)
        self._compares = gate is not None and obstacle is None
        self._limit = gate.max_initial_kl if gate is not None else None
        super().__init__(config)

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        """As verl's, and the parts of the difference where they are asked for; then compare, before any update."""
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._compares:
            found, undefined = _mismatch_of(batch)
            if undefined is not None:
                raise RuntimeError(_broken(undefined, found.num_tokens, self.global_steps))
            if found.num_tokens:
                metrics["qerl/rollout_kl_k3"] = found.kl_k3
                metrics["qerl/rollout_log_prob_abs_diff"] = found.log_prob_abs_diff
                self._pass_gate(found, metrics)
        return batch

    def _pass_gate(self, found: Mismatch, metrics: Mapping[str, float]) -> None:
        limit, self._limit = self._limit, None  # the gate is for the first step only
        if limit is not None and not found.kl_k3 <= limit:  # the actor's NaN does not pass
            parts, remedy = _parts_told(metrics)
            raise RuntimeError(
                f"the rollout is not the actor's model: KL(rollout || actor)={found.kl_k3:.3g} nats per token over"
                f" {found.num_tokens} tokens at step {self.global_steps}.{parts} Accepted is at most"
                f" qerl.max_initial_kl={limit:g}. {remedy}, or raise it by"
                " `+qerl.max_initial_kl=...` (null switches the gate off)."
            )


def _parts_told(metrics: Mapping[str, float]) -> tuple[str, str]:
    """What the difference is made of, the largest share first, and what to do; without `mismatch_sample` no parts."""
    found = [
        (metrics[f"qerl/mismatch_{name}_share"], metrics[f"qerl/mismatch_{name}"], name)
        for name in PARTS
        if f"qerl/mismatch_{name}" in metrics
    ]
    if not found or not all(math.isfinite(share) for share, _, _ in found):
        return "", _CHECK_WEIGHTS
    found.sort(reverse=True)
    told = ", ".join(f"{name} {size:.3g} ({share:.0%})" for share, size, name in found)
    count = metrics["qerl/mismatch_num_tokens"]
    sentence = f" Taken apart over {count} tokens, in nats per token and share of the square: {told}."
    return sentence, _REMEDIES.get(found[0][2], _CHECK_WEIGHTS)


def _broken(undefined: Undefined, num_tokens: int, step: int) -> str:
    return (
        f"the rollout's log-probs are not finite at {undefined.num_tokens} of {num_tokens} tokens at step {step}, in"
        f" {undefined.num_answers} answers, first at token {undefined.first} of one. Finite ones are needed: its"
        " weights or its kernels are broken. Try"
        " `+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.verl_qerl.linear=stock`, and report this."
    )


def _mismatch_of(batch: Any) -> tuple[Mismatch, Undefined | None]:
    """Of a batch in the TransferQueue whose `old_log_probs` are there."""
    import transfer_queue as tq  # not on the driver, which asks for options only

    fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    data = data.to_padded_tensor()
    rollout, mask = data["rollout_log_probs"], data["response_mask"]
    return rollout_mismatch(rollout, data["old_log_probs"], mask), undefined_log_probs(rollout, mask)
