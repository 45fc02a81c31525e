"""Answers of a batch scored again: by the rollout engine before it sleeps, without noise, and by the rounded actor.

After a batch is sampled and before the rollout sleeps, some of its sequences go back to the rollout engine as prompts,
in one pass each.
"""

import math
from typing import Any

import torch
from verl.utils.debug import marked_timer

from verl_qerl import upstream
from verl_qerl.verl_plugin import hosts
from verl_qerl.verl_plugin.rollout.engine_scores import score_answers
from verl_qerl.verl_plugin.trainer.feature import Rescored, Run
from verl_qerl.verl_plugin.trainer.model_fields import with_tensors
from verl_qerl.verl_plugin.trainer.noise import switch_noise
from verl_qerl.verl_plugin.weight_sync.requantize import ROUNDED


def keep_sample(buffer: Any, run: Run) -> None:
    """Keep in `run.sampled` what verl's buffer gives: its trainer does not tell the hook after sampling."""
    sample = buffer.sample

    def sample_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, dict]:
        batch, metrics = sample(*args, **kwargs)
        run.sampled, run.actor_scores = batch, {}
        return batch, metrics

    upstream.set_method(hosts.SAMPLE, buffer, sample_and_keep)


def rescore(run: Run, count: int, wants_noisy: bool = False) -> Rescored:
    """Let the rollout, which must be awake, score answers of the batch sampled last; raises as `score_answers`.

    Args:
        run: Its rollout has the noise of the step, before and after.
    """
    with marked_timer("rescore", run.trainer.timing_raw, color="red"):
        batch = run.sampled
        keys = evenly(batch.keys, count)
        fields = read_fields(batch, keys, ["prompts", "responses"])
        pairs = zip(fields["prompts"].unbind(0), fields["responses"].unbind(0), strict=True)
        rows = [(prompt.tolist(), response.tolist()) for prompt, response in pairs]
        run.clear_engines()
        noisy, sigma = None, run.sigma(run.step)
        own_draws = sigma > 0 and run.aqn.draw != "batch"  # prompts have no noise then
        switches = sigma > 0 and not own_draws
        if switches:
            noisy = score_answers(run.servers(), rows, run.max_model_len)[0] if wants_noisy else None
            switch_noise(run, 0.0, 0)
        try:
            clean, versions = score_answers(run.servers(), rows, run.max_model_len)
        finally:
            if switches:
                switch_noise(run, sigma, run.step)
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        began = [tags[key].get("min_global_steps") for key in keys]
        stale = [begin is not None and begin != now for begin, now in zip(began, versions, strict=True)]
        return Rescored(keys, clean, noisy, torch.tensor(stale), own_draws)


def score_actor(run: Run, batch: Any, keys: list[str], rounded: bool) -> torch.Tensor:
    """Log-probs of the answers' tokens by the actor before its update, [answers, tokens] padded with NaN.

    They are kept for who asks again in the same step.

    Args:
        batch: Its other answers fill up what the actor's ranks share.
        rounded: With the weights of its linears rounded as the rollout's are.
    """
    from transfer_queue import KVBatchMeta
    from verl.workers.utils.padding import response_from_nested

    wanted = (rounded, *keys)
    if wanted in run.actor_scores:
        return run.actor_scores[wanted]
    rollout, workers = run.config.actor_rollout_ref.rollout, run.trainer.actor_rollout_wg
    ranks = max(workers._dispatch_info["actor"]) + 1  # as verl's _balance_batch, which ran
    filled = list(dict.fromkeys([*keys, *batch.keys]))[: -(-len(keys) // ranks) * ranks]  # a batch is a multiple of it
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    info = {"calculate_entropy": False, "compute_loss": False, "temperature": rollout.temperature, ROUNDED: rounded}
    if not rollout.log_prob_use_dynamic_bsz:  # where verl scores nothing, its size need not divide a batch
        info["micro_batch_size_per_gpu"] = math.gcd(len(filled) // ranks, rollout.log_prob_micro_batch_size_per_gpu)
    asked = KVBatchMeta(
        partition_id=batch.partition_id, keys=filled, tags=[tags[key] for key in filled], extra_info=info
    )
    workers.compute_log_prob(with_tensors(asked))
    data = read_fields(batch, keys, ["log_probs", "response_mask"])
    found = response_from_nested(data["log_probs"], data["response_mask"]).to_padded_tensor(torch.nan)
    run.actor_scores[wanted] = found
    return found


def stored_log_probs(run: Run, batch: Any, keys: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rollout_log_probs, old_log_probs, response_mask) in the TransferQueue, [answers, tokens] padded.

    In bypass mode the first two are the same, and come once.
    """
    fields = ["rollout_log_probs", "rollout_log_probs" if run.bypasses else "old_log_probs", "response_mask"]
    data = read_fields(batch, keys, [*set(fields)]).to_padded_tensor()
    rollout, old, mask = (data[name] for name in fields)
    return rollout, old, mask


def log_probs_of(run: Run, batch: Any, keys: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the rollout and of the actor, and response_mask, [answers, tokens] padded.

    In bypass mode `old_log_probs` are the rollout's, so that the actor scores these answers here.
    """
    rollout, actor, mask = stored_log_probs(run, batch, keys)
    if run.bypasses:
        actor = score_actor(run, batch, keys, rounded=False)
    return rollout, actor, mask


def read_fields(batch: Any, keys: list[str], names: list[str]) -> Any:
    """Fields of some answers of a batch in the TransferQueue."""
    import transfer_queue as tq  # not on the driver, which asks for options only

    return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)


def evenly(keys: list[str], count: int) -> list[str]:
    """At most `count` of the keys, evenly spread over all."""
    count = min(count, len(keys))
    return [keys[at * len(keys) // count] for at in range(count)]


def padded(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    """[rows, width], NaN behind the end of each."""
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in rows])
