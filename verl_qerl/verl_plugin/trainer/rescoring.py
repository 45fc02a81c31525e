"""Answers of a batch scored again: by the rollout engine before it sleeps, without noise, and by the rounded actor.

After a batch is sampled and before the rollout sleeps, some of its sequences go back to the rollout engine as prompts,
in one pass each. In `colocate_async` requests are in flight meanwhile: while the clean score is taken, a fraction of a
second, they are sampled without noise; their log-probs are recorded as sampled.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from omegaconf import DictConfig
from verl.utils.debug import marked_timer

from verl_qerl.verl_plugin.rollout.engine_scores import Row, score_answers
from verl_qerl.verl_plugin.weight_sync.requantize import ROUNDED

if TYPE_CHECKING:
    from verl_qerl.verl_plugin.trainer.trainer import NoiseMixin as _Noise
else:
    _Noise = object  # stands before it in the trainers


class Rescored(NamedTuple):
    """Sequences of one batch, by key, and what the engine said of the tokens of their answers.

    Attributes:
        keys: Of the sequences.
        clean: [tokens] float32 of each, without noise; NaN behind a cut.
        noisy: The same with the noise of the step; None without noise, or where nobody asked.
        stale: [sequences] bool, whether other weights sampled it.
        own_draws: Whether answers were sampled with draws of the noise of their own, which no score has.
    """

    keys: list[str]
    clean: list[torch.Tensor]
    noisy: list[torch.Tensor] | None
    stale: torch.Tensor
    own_draws: bool


class RescoringMixin(_Noise):
    """Hooks of verl's PPOTrainer; does nothing in steps for which `_num_to_rescore` is 0."""

    def __init__(self, config: DictConfig) -> None:
        self._sampled: Any = None
        self._rescored: Rescored | None = None
        super().__init__(config)

    def _may_rescore(self) -> bool:
        """Whether this run may want scores in some step."""
        return False

    def _keeps_sample(self) -> bool:
        """Whether `_sampled` is to be what was sampled last."""
        return self._may_rescore()

    def _num_to_rescore(self) -> int:
        """How many sequences of this step are wanted."""
        return 0

    def _wants_noisy(self) -> bool:
        """Whether they are wanted with the noise of the step too."""
        return False

    def _build_replay_buffer(self) -> Any:
        """As verl's; the trainer's hook after sampling is not told what was sampled, so the buffer keeps it."""
        buffer = super()._build_replay_buffer()
        if self._keeps_sample():
            sample = buffer.sample

            def sample_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, dict]:
                batch, metrics = sample(*args, **kwargs)
                self._sampled = batch
                return batch, metrics

            buffer.sample = sample_and_keep
        return buffer

    def on_sample_end(self) -> None:
        """Score a part of the batch anew, while the rollout is awake."""
        count, self._rescored = self._num_to_rescore(), None
        if count:
            with marked_timer("rescore", self.timing_raw, color="red"):
                self._rescored = self._rescore(self._sampled, count)
        super().on_sample_end()

    def _rescore(self, batch: Any, count: int) -> Rescored | None:
        import transfer_queue as tq  # not on the driver, which asks for options only

        keys = evenly(batch.keys, count)
        fields = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"])
        pairs = zip(fields["prompts"].unbind(0), fields["responses"].unbind(0), strict=True)
        rows = [(prompt.tolist(), response.tolist()) for prompt, response in pairs]
        noisy, sigma = None, self._sigma(self.global_steps)
        own_draws = sigma > 0 and self._aqn.draw != "batch"  # prompts have no noise then
        switches = sigma > 0 and not own_draws
        if switches:
            noisy = self._score(rows)[0] if self._wants_noisy() else None
            self._switch_noise(0.0, 0)
        try:
            clean, versions = self._score(rows)
        finally:
            if switches:
                self._switch_noise(sigma, self.global_steps)
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        began = [tags[key].get("min_global_steps") for key in keys]
        stale = [begin is not None and begin != now for begin, now in zip(began, versions, strict=True)]
        return Rescored(keys, clean, noisy, torch.tensor(stale), own_draws)

    def _score(self, rows: list[Row]) -> tuple[list[torch.Tensor], list[int]]:
        return score_answers(self._servers(), rows, self.config.actor_rollout_ref.rollout.max_model_len)

    def _score_rounded(self, batch: Any, keys: list[str]) -> torch.Tensor:
        """Log-probs of the answers' tokens by the actor with its weights rounded, [batch, tokens] padded."""
        import transfer_queue as tq
        from transfer_queue import KVBatchMeta
        from verl.workers.utils.padding import response_from_nested

        rollout, workers = self.config.actor_rollout_ref.rollout, self.actor_rollout_wg
        multiple = max(workers._dispatch_info["actor"]) + 1  # as verl's _balance_batch, which ran
        if not rollout.log_prob_use_dynamic_bsz:
            multiple *= rollout.log_prob_micro_batch_size_per_gpu
        others = [key for key in batch.keys if key not in set(keys)]  # a batch is a multiple of it
        keys = keys + others[: -len(keys) % multiple]
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        info = {"calculate_entropy": False, "compute_loss": False, "temperature": rollout.temperature, ROUNDED: True}
        asked = KVBatchMeta(
            partition_id=batch.partition_id, keys=keys, tags=[tags[key] for key in keys], extra_info=info
        )
        workers.compute_log_prob(asked)
        fields = ["log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        found = response_from_nested(data["log_probs"], data["response_mask"])
        return found.to_padded_tensor(torch.nan)


def evenly(keys: list[str], count: int) -> list[str]:
    """At most `count` of the keys, spread over all."""
    return keys[:: max(1, len(keys) // count)][:count]


def padded(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    """[rows, width], NaN behind the end of each."""
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in rows])
