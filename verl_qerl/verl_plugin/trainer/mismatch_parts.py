"""`+qerl.mismatch_sample=N`: what the difference between actor and rollout log-probs is made of, each step.

N sequences of each batch are scored again (`rescoring.py`): by the rollout engine once with the noise of the step and
once without, and where the rollout is quantized at every sync, by the actor with rounded weights as well.
`algos.mismatch_parts` says how the parts follow.

Where `aqn.draw` is `sequence` or `token` a score of the whole, a prompt, is without noise and cannot be with it: then
what was sampled stands for the score with noise.
"""

from typing import Any

import torch
from omegaconf import DictConfig

from verl_qerl.algos.mismatch_parts import Scores, mismatch_parts
from verl_qerl.verl_plugin.trainer.mismatch import gate_options
from verl_qerl.verl_plugin.trainer.rescoring import Rescored, RescoringMixin, padded
from verl_qerl.verl_plugin.weight_sync.requantize import requantizes


class MismatchPartsMixin(RescoringMixin):
    """Hooks of verl's PPOTrainer; does nothing unless `qerl.mismatch_sample` is above 0."""

    def __init__(self, config: DictConfig) -> None:
        options = gate_options(config)
        self._num_taken_apart = options.mismatch_sample if options is not None else 0
        self._rounds = requantizes(config)
        super().__init__(config)

    def _may_rescore(self) -> bool:
        return super()._may_rescore() or self._num_taken_apart > 0

    def _num_to_rescore(self) -> int:
        return max(super()._num_to_rescore(), self._num_taken_apart)

    def _wants_noisy(self) -> bool:
        return super()._wants_noisy() or self._num_taken_apart > 0

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        """As verl's; then the actor's log-probs are there too."""
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._num_taken_apart and self._rescored is not None:
            quantized = self._score_rounded(batch, self._rescored.keys) if self._rounds else None
            for name, value in _parts_of(batch.partition_id, self._rescored, quantized).items():
                metrics[f"qerl/mismatch_{name}"] = value
        return batch


def _parts_of(partition_id: str, rescored: Rescored, quantized: torch.Tensor | None) -> dict[str, float]:
    """Metric -> value. `quantized`: of these sequences and maybe more, behind them."""
    import transfer_queue as tq

    fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=rescored.keys, partition_id=partition_id, select_fields=fields).to_padded_tensor()
    mask = data["response_mask"].bool()
    clean = padded(rescored.clean, mask.shape[1])
    noisy = None if rescored.noisy is None else padded(rescored.noisy, mask.shape[1])
    mask &= ~clean.isnan()  # behind the cut
    if rescored.own_draws:  # of older weights it says nothing
        noisy = torch.where(rescored.stale[:, None], clean, data["rollout_log_probs"])
    if quantized is not None:
        quantized = quantized[: len(mask), : mask.shape[1]]
    scores = Scores(data["old_log_probs"], clean, data["rollout_log_probs"], quantized, noisy)
    metrics: dict[str, float] = {"num_tokens": int(mask.sum())}
    for name, part in mismatch_parts(scores, mask, rescored.stale).items():
        metrics |= {name: part.abs_diff, f"{name}_share": part.share}
    return metrics
