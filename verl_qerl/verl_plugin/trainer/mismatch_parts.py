"""`+qerl.gate.mismatch_sample=N`: what the difference between actor and rollout log-probs is made of, each step.

N sequences of each batch are scored again (`rescoring.py`): by the rollout engine once with the noise of the step and
once without, and where the rollout is quantized at every sync, by the actor with rounded weights as well.
`algos.mismatch_parts` says how the parts follow.

Where `aqn.draw` is `sequence` or `token` a score of the whole, a prompt, is without noise and cannot be with it: then
what was sampled stands for the score with noise.
"""

from typing import Any

import torch

from verl_qerl.algos.mismatch_parts import Scores, mismatch_parts
from verl_qerl.verl_plugin.trainer.feature import Feature, Rescored, Run
from verl_qerl.verl_plugin.trainer.rescoring import log_probs_of, padded, rescore, score_actor


class MismatchParts(Feature):
    """Has a part of each batch scored again, and takes the difference apart."""

    def before_sample_end(self) -> None:
        """Score the sample while the rollout is awake."""
        run: Run = self._run
        assert run.gate is not None
        run.rescored = rescore(run, run.gate.mismatch_sample, wants_noisy=True)

    def after_old_log_prob(self, batch: Any, tags: dict[str, dict], metrics: dict[str, Any]) -> None:
        """Now the actor's log-probs are there too."""
        run = self._run
        if run.rescored is not None:
            for name, value in _parts_of(run, batch, run.rescored).items():
                metrics[f"qerl/mismatch_{name}"] = value


def _parts_of(run: Run, batch: Any, rescored: Rescored) -> dict[str, float]:
    """Metric -> value."""
    quantized = score_actor(run, batch, rescored.keys, rounded=True) if run.requantizes else None
    rollout, actor, mask = log_probs_of(run, batch, rescored.keys)
    mask = mask.bool()
    clean = padded(rescored.clean, mask.shape[1])
    noisy = None if rescored.noisy is None else padded(rescored.noisy, mask.shape[1])
    mask &= ~clean.isnan()  # behind the cut
    if rescored.own_draws:  # of older weights it says nothing
        noisy = torch.where(rescored.stale[:, None], clean, rollout)
    scores = Scores(actor, clean, rollout, quantized, noisy)
    metrics: dict[str, float] = {"num_tokens": int(mask.sum())}
    for name, part in mismatch_parts(scores, mask, rescored.stale).items():
        metrics |= {name: part.abs_diff, f"{name}_share": part.share}
    return metrics
