"""`+qerl.mismatch_sample=N`: what the difference between actor and rollout log-probs is made of, each step.

After a batch is sampled and before the rollout sleeps, N of its sequences go back to the rollout engine as prompts: it
scores their tokens once with the noise of the step and once without, in one pass each. Where the rollout is quantized
at every sync, the actor scores them with rounded weights as well. `algos.mismatch_parts` says how the parts follow. In
`colocate_async` requests are in flight meanwhile: while the clean score is taken, a fraction of a second, they are
sampled without noise; their log-probs are recorded as sampled.

Where `aqn.draw` is `sequence` or `token` a score of the whole, a prompt, is without noise and cannot be with it: then
what was sampled stands for the score with noise.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from omegaconf import DictConfig
from verl.utils.debug import marked_timer

from verl_qerl.algos.mismatch_parts import Scores, mismatch_parts
from verl_qerl.verl_plugin.engine_scores import Row, score_answers
from verl_qerl.verl_plugin.mismatch import gate_options
from verl_qerl.verl_plugin.requantize import ROUNDED, requantizes

if TYPE_CHECKING:
    from verl_qerl.verl_plugin.trainer import NoiseMixin as _Noise
else:
    _Noise = object  # stands before it in the trainers


class _Rescored(NamedTuple):
    """Sequences of one batch, by key, and what the engine said of the tokens of their answers."""

    keys: list[str]
    clean: list[torch.Tensor]
    noisy: list[torch.Tensor] | None
    stale: torch.Tensor
    own_draws: bool


class MismatchPartsMixin(_Noise):
    """Hooks of verl's PPOTrainer; does nothing unless `qerl.mismatch_sample` is above 0."""

    def __init__(self, config: DictConfig) -> None:
        options = gate_options(config)
        self._num_rescored = options.mismatch_sample if options is not None else 0
        self._requantizes = requantizes(config)
        self._sampled: Any = None
        self._rescored: _Rescored | None = None
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        """As verl's; the trainer's hook after sampling is not told what was sampled, so the buffer keeps it."""
        buffer = super()._build_replay_buffer()
        if self._num_rescored:
            sample = buffer.sample

            def sample_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, dict]:
                batch, metrics = sample(*args, **kwargs)
                self._sampled = batch
                return batch, metrics

            buffer.sample = sample_and_keep
        return buffer

    def on_sample_end(self) -> None:
        """Score a part of the batch anew, while the rollout is awake."""
        if self._num_rescored:
            with marked_timer("mismatch_parts", self.timing_raw, color="red"):
                self._rescored = self._rescore(self._sampled)
        super().on_sample_end()

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        """As verl's; then the actor's log-probs are there too."""
        batch = super()._compute_old_log_prob(batch, metrics)
        rescored, self._rescored = self._rescored, None
        if rescored is not None:
            quantized = self._score_rounded(batch, rescored.keys) if self._requantizes else None
            for name, value in _parts_of(batch.partition_id, rescored, quantized).items():
                metrics[f"qerl/mismatch_{name}"] = value
        return batch

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

    def _rescore(self, batch: Any) -> _Rescored:
        import transfer_queue as tq  # not on the driver, which asks for options only

        places = range(0, len(batch.keys), max(1, len(batch.keys) // self._num_rescored))[: self._num_rescored]
        keys = [batch.keys[at] for at in places]
        fields = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"])
        pairs = zip(fields["prompts"].unbind(0), fields["responses"].unbind(0), strict=True)
        rows = [(prompt.tolist(), response.tolist()) for prompt, response in pairs]
        noisy, sigma = None, self._sigma(self.global_steps)
        own_draws = sigma > 0 and self._aqn.draw != "batch"
        if sigma and not own_draws:
            noisy, _ = self._score(rows)
            self._switch_noise(0.0, 0)
        clean, versions = self._score(rows)
        if noisy is not None:
            self._switch_noise(sigma, self.global_steps)
        began = [batch.tags[at].get("min_global_steps") for at in places]
        stale = [begin is not None and begin != now for begin, now in zip(began, versions, strict=True)]
        return _Rescored(keys, clean, noisy, torch.tensor(stale), own_draws)

    def _score(self, rows: list[Row]) -> tuple[list[torch.Tensor], list[int]]:
        return score_answers(self._servers(), rows, self.config.actor_rollout_ref.rollout.max_model_len)


def _parts_of(partition_id: str, rescored: _Rescored, quantized: torch.Tensor | None) -> dict[str, float]:
    """Metric -> value. `quantized`: of these sequences and maybe more, behind them."""
    import transfer_queue as tq

    fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=rescored.keys, partition_id=partition_id, select_fields=fields).to_padded_tensor()
    mask = data["response_mask"].bool()
    clean, noisy = (_padded(rows, mask.shape[1]) for rows in (rescored.clean, rescored.noisy))
    assert clean is not None
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


def _padded(rows: list[torch.Tensor] | None, width: int) -> torch.Tensor | None:
    if rows is None:
        return None
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in rows])
