"""Steps of verl's trainers from the replay buffer to `old_log_probs`, with servers that score by a table."""

from collections import Counter
from types import SimpleNamespace

import pytest
import ray
import torch
import transfer_queue
from qerl_testing import load_beside, run_config
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

from verl_qerl.verl_plugin.trainer.noise_effect import NoiseEffect
from verl_qerl.verl_plugin.weight_sync.requantize import ROUNDED

nested = load_beside(__file__, "transfer_queue_fakes").nested
AQN = ("+aqn.enabled=true", "+aqn.num_stages=2", "+aqn.sigma_start=0.1", "+aqn.sigma_end=0.1")
SEQUENCES = {f"{uid}_0_0": ([5, 6][: 1 + uid % 2], [7, 8 + uid, 9, 11 + uid]) for uid in range(6)}


def log_prob(tokens):
    """Of the last of the tokens, by the model that everyone means to have."""
    return -1.0 - (sum(tokens) * 37 % 11) / 7


class Server:
    """Scores by `log_prob`; `weights` moves it, and so does its noise, unless that is of answers alone."""

    def __init__(self, weights=0.0, own_draws=False):
        self.weights, self.sigma, self.version, self.calls = weights, None, 4, []
        self.own_draws = own_draws
        self.generate = SimpleNamespace(remote=self._generate)
        # verl's server has resolved rollout.max_model_len, which is null in these runs.
        self.get_rollout_config = SimpleNamespace(remote=lambda: SimpleNamespace(max_model_len=8))
        self.collective_rpc = SimpleNamespace(remote=self._rpc)
        self.qerl_clear_kv_cache = SimpleNamespace(remote=lambda: self.calls.append("clear"))
        self.resume_engine_generation = SimpleNamespace(remote=lambda: self.calls.append("resume"))

    def score(self, tokens):
        return log_prob(tokens) + self.weights + (0.0 if self.own_draws else self.sigma or 0.0)

    def _generate(self, prompt_ids, sampling_params, request_id):
        assert (sampling_params["temperature"], sampling_params["max_tokens"]) == (1.0, 1)
        assert len(prompt_ids) < 8, "no room for a token"
        self.calls.append((self.sigma, len(prompt_ids)))
        scores = [[self.score(prompt_ids[: at + 1])] for at in range(1, len(prompt_ids))]
        fields = {"prompt_logprobs": [*scores, [0.0]], "prompt_ids": [[token] for token in prompt_ids[1:]] + [[0]]}
        return SimpleNamespace(extra_fields={"global_steps": self.version, **fields})

    def _rpc(self, method, kwargs):
        self.sigma = kwargs["sigma"]
        self.calls.append(kwargs)
        return [(4, 7)]


@pytest.fixture
def scored_step(monkeypatch):
    """Runs a trainer of verl's registry from its replay buffer to `old_log_probs`; returns metrics and servers.

    It takes one step, number 5 of 6, or the last ones of 6 if there are several values of `sampled`.
    """
    monkeypatch.setattr(ray, "get", lambda found: found)

    def init(self, config):
        self.config, self.timing_raw = config, {}
        self.replay_buffer = self._build_replay_buffer()

    monkeypatch.setattr(trainer_base.PPOTrainer, "__init__", init)

    def run(
        *overrides, sampled=0.0, actor=0.0, rounded=0.0, versions=None, servers=None, sequences=SEQUENCES, padding=0
    ):
        """`sampled`, `actor`, `rounded` (the actor with such weights): by how much they differ from `log_prob`.

        The last `padding` sequences are those by which verl fills a batch up.

        Then `passes` has the answers of each pass of the actor, and `fetched` the number of each field of answers.
        """
        moves = list(sampled) if isinstance(sampled, tuple) else [sampled]
        keys = list(sequences)
        versions = versions or ([4] if len(moves) == 1 else [None]) * len(keys)
        tags = [{"min_global_steps": version} for version in versions]
        filled = keys[len(keys) - padding :]
        for tag in tags[len(keys) - padding :]:
            tag["is_padding"] = True
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        buffer = SimpleNamespace(sample=lambda **kwargs: (batch, {}))
        monkeypatch.setattr(trainer_base.PPOTrainer, "_build_replay_buffer", lambda self: buffer)
        config = run_config(*overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        # NoiseEffect asks the engine for itself: test_noise_effect.
        trainer.features = [feature for feature in trainer.features if not isinstance(feature, NoiseEffect)]
        servers = servers or [Server(), Server()]
        replicas = [SimpleNamespace(servers=[server]) for server in servers]
        trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
        trainer.checkpoint_manager = SimpleNamespace(
            abort_replicas=lambda: [server.calls.append("abort") for server in servers],
            sleep_replicas=lambda: [server.calls.append("sleep") for server in servers],
        )
        trainer.curr_step_profile = False
        trainer.total_training_steps = trainer.steps_per_epoch = 6
        store, run.passes, run.fetched = {}, [], Counter()

        def compute_log_prob(batch):
            # As the engine: one ahead, with the flag by another model.
            move = rounded if batch.extra_info.get(ROUNDED) else actor
            per_gpu = trainer.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
            size = batch.extra_info.get("micro_batch_size_per_gpu", per_gpu)
            assert len(batch.keys) % (2 * size) == 0, "data size must be divisible by micro_batch_size_per_gpu"
            run.passes.append(batch.keys)
            for key in batch.keys:
                store[key]["log_probs"] = store[key]["entropy"] = torch.tensor([*rows(key, move), 9.0])
            return batch

        workers = SimpleNamespace(compute_log_prob=compute_log_prob, _dispatch_info={"actor": [0, 0, 1, 1]})
        trainer.actor_rollout_wg = workers

        def rows(key, move):
            prompt, response = sequences[key]
            whole = prompt + response
            return [log_prob(whole[: at + 1]) + move for at in range(len(prompt), len(whole))]

        def fill(sampled):
            for key, (prompt, response) in sequences.items():
                store[key] = {
                    "prompts": torch.tensor(prompt),
                    "responses": torch.tensor(response),
                    "response_mask": torch.tensor([1, 1, 0, 1][: len(response)]) * (key not in filled),
                    "rollout_log_probs": torch.tensor(rows(key, sampled)),
                }

        def get(keys, partition_id, select_fields=None):
            run.fetched.update(dict.fromkeys(select_fields or (), len(keys)))
            names = select_fields or store[keys[0]]
            return TensorDict({name: nested(store[key][name] for key in keys) for name in names}, batch_size=len(keys))

        def put(keys, partition_id, fields):
            for name, values in fields.items():
                for key, value in zip(keys, values.unbind(), strict=True):
                    store[key][name] = value
            return batch

        monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_batch_get=get, kv_batch_put=put))
        monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
        found = []
        for number, move in enumerate(moves, 5 if len(moves) == 1 else 7 - len(moves)):
            trainer.global_steps = number
            fill(move)
            for server in servers:
                server.sigma = trainer.run.sigma(number) or None
            metrics = {}
            batch, _ = trainer.replay_buffer.sample(global_steps=number, partition_id="train", batch_size=6)
            trainer.on_sample_end()
            batch.reorder(list(reversed(range(len(keys)))))  # as verl balances its ranks
            trainer._compute_old_log_prob(batch, metrics=metrics)
            found.append({name: value for name, value in metrics.items() if name.startswith("qerl/")})
        return found if isinstance(sampled, tuple) else found[0], servers

    return run
