"""The rollout against the actor: metrics of every step, a gate at the first one, and a limit for the others.

Both log-probs of the sampled tokens are there once verl has computed `old_log_probs`, which is before any update; in
bypass mode verl leaves that out, and the actor scores a few answers for us in every tenth step. So a rollout that is
not the actor's model stops the run at its first step, also at the first after a resume. In the metrics `rollout` is the
model as it sampled, noise included (`aqn/sigma` says how much) and as old as its answers are.

The limits are for models that should be equal. So noise is left out, where there is some: the engine scores a few
answers without it. Where the rollout is quantized at every sync the actor scores them with its linears rounded alike.
And answers that older weights began do not count. In later steps both are done only when the difference as sampled is
above the limit; for a score without noise it is too late then, and the next step has one.

A rollout whose log-probs are not finite stops a run at any step: a correction by them (TIS, ACR) would go into the
loss.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig

from verl_qerl.algos.mismatch import Mismatch, rollout_mismatch, undefined_log_probs
from verl_qerl.algos.mismatch_parts import PARTS
from verl_qerl.options import rules
from verl_qerl.options.schema import LATER_STEPS, SAME_WEIGHTS_KL, Qerl
from verl_qerl.options.schema import Gate as GateOptions
from verl_qerl.verl_plugin.config.nodes import run_of
from verl_qerl.verl_plugin.rollout.engine_scores import UnscoredError
from verl_qerl.verl_plugin.trainer.feature import Feature, Run
from verl_qerl.verl_plugin.trainer.rescoring import evenly, log_probs_of, padded, rescore, score_actor, stored_log_probs

logger = logging.getLogger(__name__)

_SAMPLE = 16  # answers, where the gate has some scored
_BYPASSED = 10  # steps, of which the gate looks at one in bypass mode: it takes half a second of a 1.5B, 1.5 s of a 7B
_NO_LIMITS = "the limits of KL(rollout || actor) do not hold in steps with noise: %s."
# Why a limit did not look at a step. Verl may sample a batch ahead.
_NO_ANSWER = (
    "qerl.gate.%s=%g did not look at step %d, and will not at steps like it: it looks at answers that the present"
    " weights began, and older ones began all %d. Set trainer.v1.%s.num_warmup_batches=0 to have such answers, or watch"
    " qerl/rollout_kl_k3, which contains how far the weights have moved since."
)
_NO_TOKEN = (
    "qerl.gate.%s=%g did not look at step %d, and looks at the next: no token of its answers is left to score. They are"
    " masked, or end where rollout.max_model_len does. For the latter raise it by 1."
)
_CHECK_WEIGHTS = "Check that both have the same weights and versions"


def gate_options(config: DictConfig) -> GateOptions | None:
    """Options of a run, with the limits in force; None where it neither sets any nor has a rollout of ours.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    run = run_of(config)
    options = Qerl.from_mapping(run("qerl"))
    given, base, gate = run(GateOptions.NODE) or {}, options.base.format, options.gate
    if rules.unmet(run, rules.WHOLE):
        gate = replace(gate, max_initial_kl=None, max_kl=None)
    else:
        if "max_initial_kl" not in given and base in rules.EXACT:
            gate = replace(gate, max_initial_kl=SAME_WEIGHTS_KL)
        if "max_kl" not in given:
            first = gate.max_initial_kl
            gate = replace(gate, max_kl=None if first is None else LATER_STEPS * first)
    return gate if given or base is not None or run("aqn.enabled") else None


def can_compare(run: Run) -> bool:
    """Whether a run with a gate has the log-probs that it compares; what is in the way is logged."""
    obstacle = rules.unmet(run.option, rules.COMPARED)
    if obstacle is not None:
        logger.warning("the gate at the first step cannot look, and qerl/rollout_* are not logged: %s.", obstacle)
    return obstacle is None


class Gate(Feature):
    """Compares the rollout with the actor in every step, and holds the difference against the limits."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        assert run.gate is not None
        self._gate = run.gate
        self._engine_obstacle = rules.unmet(run.option, rules.SCORED)
        self._first_step = True
        self._looks_closely = False  # the last step was above the limit
        self._told_blind: set[tuple[str, str]] = set()  # limits that did not look at a step, and why
        self._kl_before: float | None = None  # of the last step, if it was above the limit with all set apart

        if cut := rules.unmet(run.option, rules.WHOLE):
            logger.warning("the gate at the first step does not look, and qerl/rollout_* contain the cut of %s.", cut)
        elif run.aqn.enabled and self._engine_obstacle and run.gate.max_initial_kl is not None:
            logger.warning(_NO_LIMITS, self._engine_obstacle)

    def before_sample_end(self) -> None:
        """Score answers without noise if a limit needs it and `MismatchParts` has not done so."""
        run: Run = self._run
        if self._gate.mismatch_sample:
            return
        run.rescored = None
        wanted = self._gate.max_initial_kl is not None if self._first_step else self._looks_closely
        if not wanted or self._engine_obstacle is not None or not run.sigma(run.step):
            return
        try:
            run.rescored = rescore(run, _SAMPLE)
        except UnscoredError:
            self._engine_obstacle = "the engine scores prompts of text alone"
            logger.warning(_NO_LIMITS, self._engine_obstacle)

    def after_old_log_prob(self, batch: Any, tags: dict[str, dict], metrics: dict[str, Any]) -> None:
        """Compare, before any update."""
        step = self._run.step
        keys = batch.keys
        rollout, actor, mask = stored_log_probs(self._run, batch, keys)
        undefined = undefined_log_probs(rollout, mask)
        if undefined is not None:
            raise RuntimeError(
                f"the rollout's log-probs are not finite at {undefined.num_tokens} of {int(mask.sum())} tokens at step"
                f" {step}, in {undefined.num_answers} answers, first at token {undefined.first} of one. Finite ones are"
                " needed: its weights or its kernels are broken. Try `+qerl.rollout.linear=stock`, and report this."
            )
        if self._run.bypasses:
            if not (self._first_step or self._looks_closely or self._gate.mismatch_sample or step % _BYPASSED == 0):
                return
            rescored = self._run.rescored
            keys = evenly(_answers(keys, tags), _SAMPLE) if rescored is None else rescored.keys
            rollout, actor, mask = log_probs_of(self._run, batch, keys)
        found = rollout_mismatch(rollout, actor, mask)
        if found.num_tokens:
            metrics["qerl/rollout_kl_k3"] = found.kl_k3
            metrics["qerl/rollout_log_prob_abs_diff"] = found.log_prob_abs_diff
            # What the weights of this step began; verl tags no answer where that is always so.
            fresh = {key for key, tag in tags.items() if tag.get("min_global_steps") in (None, step - 1)}
            if not fresh:
                self._tell_blind(_NO_ANSWER, len(tags), self._run.option("trainer.v1.trainer_mode"))
            sampled = rollout_mismatch(rollout, actor, mask * torch.tensor([key in fresh for key in keys])[:, None])
            if sampled.num_tokens:
                self._judge(batch, _answers([key for key in keys if key in fresh], tags), sampled, metrics)

    def _limit(self) -> tuple[str, float | None]:
        """Name and value of the limit of this step."""
        if self._first_step:
            return "max_initial_kl", self._gate.max_initial_kl
        return "max_kl", self._gate.max_kl if self._run.syncs_each_step else None

    def _tell_blind(self, why: str, *values: Any) -> None:
        """Say of a limit, once for each reason, that it did not look at this step."""
        name, limit = self._limit()
        if limit is None or (name, why) in self._told_blind:
            return
        self._told_blind.add((name, why))
        logger.warning(why, name, limit, self._run.step, *values)

    def _judge(self, batch: Any, fresh: list[str], sampled: Mismatch, metrics: dict[str, Any]) -> None:
        """Hold a step against its limit.

        Args:
            fresh: Keys of the answers that the present weights sampled.
        """
        _, limit = self._limit()
        first, self._first_step = self._first_step, False
        if limit is None:
            return
        if not first and sampled.kl_k3 <= limit:
            self._looks_closely, self._kl_before = False, None
            return
        found, how = self._set_apart(batch, fresh, sampled)
        self._looks_closely = not first
        if found is None:
            return
        if not found.num_tokens:
            self._first_step = first  # the next step is looked at instead
            self._tell_blind(_NO_TOKEN)
            return
        if how:
            metrics["qerl/clean_kl_k3"] = found.kl_k3
        amount = f"KL(rollout || actor)={found.kl_k3:.3g} nats per token over {found.num_tokens} tokens"
        told = f"{amount}{how} at step {self._run.step}"
        if first:
            _pass_gate(found, limit, told, metrics)
        else:
            self._pass_later(found.kl_k3, limit, told)

    def _set_apart(self, batch: Any, fresh: list[str], sampled: Mismatch) -> tuple[Mismatch | None, str]:
        """The difference without noise and with weights rounded alike, None where it is not known; and in words."""
        run = self._run
        sigma = run.sigma(run.step)
        if not sigma and not run.requantizes:
            return sampled, ""
        rescored = run.rescored if sigma else None
        if sigma and rescored is None:
            return None, ""
        keys = rescored.keys if rescored is not None else evenly(fresh, self._gate.mismatch_sample or _SAMPLE)
        rollout, actor, mask = log_probs_of(run, batch, keys)
        how = f" of {len(keys)} answers"
        if rescored is not None:
            how += f" scored without the noise (aqn.sigma is {sigma:g})"
            rollout = padded(rescored.clean, mask.shape[1])
            mask = mask.bool() & ~rollout.isnan()  # behind a cut
        if run.requantizes:
            how += ", with the actor's linears rounded as the rollout's are"
            actor = score_actor(run, batch, keys, rounded=True)
        return rollout_mismatch(rollout, actor, mask), how

    def _pass_later(self, kl: float, limit: float, told: str) -> None:
        before, self._kl_before = self._kl_before, None
        if kl <= limit:
            return
        self._kl_before = kl
        raised = "raise the limit by `+qerl.gate.max_kl=...` (null: it never stops the run)"
        if before is None:
            logger.warning(
                "%s is above qerl.gate.max_kl=%g. The run stops when the next step is too. %s, or %s.",
                told,
                limit,
                _CHECK_WEIGHTS,
                raised,
            )
            return
        raise RuntimeError(
            f"the rollout is not the actor's model any more: {told}, {before:.3g} at the"
            f" one before. Accepted is at most qerl.gate.max_kl={limit:g}. {_CHECK_WEIGHTS}, or {raised}."
        )


def _answers(keys: list[str], tags: Mapping[str, Mapping]) -> list[str]:
    """The keys without those by which verl fills a batch up, of which no token counts."""
    return [key for key in keys if not tags[key].get("is_padding")]


def _pass_gate(found: Mismatch, limit: float, told: str, metrics: Mapping[str, float]) -> None:
    if found.kl_k3 <= limit:  # the actor's NaN does not pass
        logger.warning(
            "%s, mean absolute difference %.3g: both hold the same weights, so this is the floor of this model, what"
            " arithmetic alone makes. Later steps without noise stay near it. Accepted was at most"
            " qerl.gate.max_initial_kl=%g.",
            told,
            found.log_prob_abs_diff,
            limit,
        )
        return
    raise RuntimeError(
        f"the rollout is not the actor's model: {told}.{_parts_told(metrics)} Accepted is at most"
        f" qerl.gate.max_initial_kl={limit:g}. {_CHECK_WEIGHTS}, or raise it by"
        " `+qerl.gate.max_initial_kl=...` (null switches the gate off)."
    )


def _parts_told(metrics: Mapping[str, float]) -> str:
    """What the difference as sampled is made of, the largest share first; nothing without `mismatch_sample`."""
    found = [
        (metrics[f"qerl/mismatch_{name}_share"], metrics[f"qerl/mismatch_{name}"], name)
        for name in PARTS
        if f"qerl/mismatch_{name}" in metrics
    ]
    if not found or not all(math.isfinite(share) for share, _, _ in found):
        return ""
    told = ", ".join(f"{name} {size:.3g} ({share:.0%})" for share, size, name in sorted(found, reverse=True))
    count = metrics["qerl/mismatch_num_tokens"]
    return f" As sampled and taken apart over {count} tokens, in nats per token and share of the square: {told}."
