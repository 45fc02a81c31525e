"""What is seen of the noise in verl's steps, with servers that are bigram models (with vLLM: tests/e2e)."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from qerl_testing import load_beside
from tensordict import TensorDict

from verl_qerl.algos.aqn import draw_noise, noisy_weight
from verl_qerl.verl_plugin.rollout.engine_scores import UnscoredError
from verl_qerl.verl_plugin.trainer import noise_effect
from verl_qerl.verl_plugin.trainer.noise import Noise, set_noise
from verl_qerl.verl_plugin.trainer.noise_effect import NoiseEffect
from verl_qerl.verl_plugin.trainer.noise_schedule import NoiseSchedule

featured = load_beside(__file__, "featured")
nested = load_beside(__file__, "transfer_queue_fakes").nested
VOCABULARY, NUM_ANSWERS, LENGTH = 32, 48, 80
NORMS = {f"layers.{i}.{kind}": 0.5 + i for i in range(2) for kind in ("input_layernorm", "post_attention_layernorm")}


class Server:
    """Its next token depends on the last one; noise moves all logits, by a draw for each step."""

    def __init__(self, max_model_len=4096):
        self.sigma, self.step, self.calls = 0.0, 0, []
        self.noisy_norms = lambda sigma: [len(NORMS) if sigma else 0] * 2
        self.collective_rpc = SimpleNamespace(remote=self._rpc)
        self.generate = SimpleNamespace(remote=self._generate)
        self.get_rollout_config = SimpleNamespace(remote=lambda: SimpleNamespace(max_model_len=max_model_len))
        self.qerl_clear_kv_cache = SimpleNamespace(remote=lambda: self.calls.append("clear"))
        self.resume_engine_generation = SimpleNamespace(remote=lambda: self.calls.append("resume"))

    def log_probs(self):
        """[last token, next token]."""
        logits, noise = (self._drawn(seed) for seed in (0, 1000 + self.step))
        return (logits + (3 if self.step < 5 else 6) * self.sigma * noise).log_softmax(-1)

    def _drawn(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)

    def _rpc(self, method, kwargs):
        if method == "qerl_norm_sizes":
            return [NORMS, NORMS]
        if method == "qerl_num_noisy":
            return self.noisy_norms(self.sigma)
        assert method == "qerl_set_noise"
        self.sigma, self.step = kwargs["sigma"], kwargs["step"]
        self.calls.append((self.sigma, self.step))
        return [(len(NORMS), 7)] * 2

    def _generate(self, prompt_ids, sampling_params, request_id):
        self.calls.append(("score", len(prompt_ids), self.sigma, self.step))
        found = self.log_probs()[prompt_ids[:-1], prompt_ids[1:]].tolist()
        fields = {"prompt_logprobs": [[one] for one in found] + [[0.0]], "prompt_ids": [[t] for t in prompt_ids[1:]]}
        return SimpleNamespace(extra_fields=fields | {"prompt_ids": [*fields["prompt_ids"], [0]]})


class Base(featured.Base):
    """Its rollout falls asleep with the noise of the step."""

    def on_sample_end(self):
        super().on_sample_end()
        now = (self.server.sigma, self.server.step if self.server.sigma else 0)
        sigma = self.run.sigma(self.global_steps)
        assert now == (sigma, self.global_steps if sigma else 0), "it falls asleep with other noise than its step's"


Trainer = featured.trainer_of(Noise, NoiseEffect, NoiseSchedule, base=Base)


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A trainer with `start` steps done; its servers sample what is asked for."""
    monkeypatch.setattr(ray, "get", lambda found: found)

    def build(start=0, max_model_len=4096, trainer_mode="sync", **aqn):
        rollout = {"name": "vllm", "engine_kwargs": {"vllm": {}}, "max_model_len": None}
        trainer = {"v1": {"trainer_mode": trainer_mode}, "resume_mode": "auto", "default_local_dir": str(tmp_path)}
        trainer["total_epochs"] = 1
        nodes = {"actor_rollout_ref": {"rollout": rollout}, "trainer": trainer}
        made = Trainer(OmegaConf.create(nodes | {"aqn": {"enabled": True, "num_stages": 4} | aqn}))
        made.global_steps, made.total_training_steps, made.server = start, 8, Server(max_model_len)
        made.checkpoint_manager = SimpleNamespace(abort_replicas=lambda: made.server.calls.append("abort"))
        made.llm_server_manager = SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[made.server])])
        made._load_checkpoint()
        made.on_init_end()
        return made

    return build


@pytest.fixture
def step(monkeypatch):
    """One step of a trainer: sampling, its end, a checkpoint and the end of the step. Returns the metrics."""

    def run(made, response_mask=None):
        made.global_steps += 1
        generator = torch.Generator().manual_seed(made.global_steps)
        rows = torch.zeros(NUM_ANSWERS, 1, dtype=torch.long)
        chances = made.server.log_probs().exp()
        for _ in range(2 + LENGTH):
            rows = torch.cat([rows, torch.multinomial(chances[rows[:, -1]], 1, generator=generator)], 1)
        mask = torch.ones(NUM_ANSWERS, LENGTH) if response_mask is None else response_mask
        store = {"prompts": rows[:, :3], "responses": rows[:, 3:], "response_mask": mask}
        keys = [str(index) for index in range(NUM_ANSWERS)]
        made.batch = SimpleNamespace(keys=keys, partition_id="train")

        def get(keys, partition_id, select_fields):
            places = [int(key) for key in keys]
            return TensorDict({name: nested(store[name][places]) for name in select_fields}, batch_size=len(keys))

        monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
        made.replay_buffer.sample(global_steps=made.global_steps)
        made.on_sample_end()
        made._save_checkpoint()
        made.on_step_end()
        return made._consume_sync_metrics()

    return run


def exact_kl(server, sigma, at):
    """KL(noisy || clean) of the server's next token, over the last tokens that its noisy model visits."""
    held = server.sigma, server.step
    server.sigma, server.step = sigma, at
    noisy = server.log_probs()
    server.sigma = 0.0
    clean = server.log_probs()
    server.sigma, server.step = held
    visits = torch.linalg.matrix_power(noisy.exp(), 64)[0]
    return float((visits[:, None] * noisy.exp() * (noisy - clean)).sum())


def test_the_kl_is_measured_whenever_sigma_changes(make, step):
    made = make(sigma_start=0.1, sigma_end=0.02)
    seen = [step(made) for _ in range(8)]
    assert [at for at, metrics in enumerate(seen, 1) if "aqn/kl" in metrics] == [3, 5, 7]
    for at in (3, 5, 7):
        found = seen[at - 1]
        assert found["aqn/kl"] == pytest.approx(exact_kl(made.server, found["aqn/sigma"], at), rel=0.1)
    assert [metrics["aqn/noisy_norms"] for metrics in seen] == [0, 0, *[4] * 6]


def test_a_resumed_run_measures_it_in_its_first_step(make, step):
    seen = [step(made) for made in [make(start=3, sigma_start=0.1)] for _ in range(2)]
    assert ["aqn/kl" in metrics for metrics in seen] == [True, True]  # of step 4, and of the next stage
    seen = [step(made) for made in [make(start=2, sigma_start=0.1)] for _ in range(2)]
    assert ["aqn/kl" in metrics for metrics in seen] == [True, False]


def test_the_engine_scores_a_few_beginnings_of_answers(make, step, monkeypatch):
    monkeypatch.setattr(noise_effect, "MAX_TOKENS", 50)
    made = make(start=2, sigma_start=0.1)
    made.server.calls.clear()
    step(made)
    scores = [call for call in made.server.calls if call[0] == "score"]
    assert scores == [("score", 53, 0.1, 3)] * 32 + [("score", 53, 0.0, 0)] * 32
    short = make(start=2, max_model_len=40, sigma_start=0.1)
    short.server.calls.clear()
    step(short)
    assert {call[1] for call in short.server.calls if call[0] == "score"} == {39}  # room for the token it must sample


def test_where_answers_have_draws_of_their_own_each_is_scored_with_one(make, step):
    """Their prompts are clean, so that scoring an answer as a prompt would find no noise; with a draw it keeps so."""
    made = make(start=2, sigma_start=0.1, draw="sequence")
    rows = []

    def generate(prompt_ids, sampling_params, request_id):
        rows.append((made.server.sigma, sampling_params.get("extra_args")))
        return made.server._generate(prompt_ids, sampling_params, request_id)

    made.server.generate = SimpleNamespace(remote=generate)
    assert step(made)["aqn/kl"] > 1e-3
    assert rows == [(0.1, {"aqn_row": row, "aqn_from": 3}) for row in range(1, 33)] + [(0.0, None)] * 32


@pytest.mark.parametrize("draw", ["sequence", "batch"])
def test_turns_with_draws_of_their_own_are_scored_one_by_one(make, step, draw):
    """What came before a turn is its prompt, which was clean when it was sampled."""
    made = make(start=2, sigma_start=0.1, draw=draw)
    asked = []

    def generate(prompt_ids, sampling_params, request_id):
        asked.append((len(prompt_ids), sampling_params.get("extra_args", {}).get("aqn_from")))
        return made.server._generate(prompt_ids, sampling_params, request_id)

    made.server.generate = SimpleNamespace(remote=generate)
    mask = torch.zeros(NUM_ANSWERS, LENGTH)
    mask[:, :10] = mask[:, 30:31] = mask[:, -5:] = 1
    assert step(made, mask)["aqn/kl"] > 1e-3
    turns = {(13, 3), (34, 33), (83, 78)} if draw == "sequence" else {(83, None)}
    assert len(asked) == 2 * 32 * len(turns)
    assert set(asked[: len(asked) // 2]) == turns
    assert {size for size, _ in asked[len(asked) // 2 :]} == {size for size, _ in turns}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_nothing_is_sampled_while_answers_are_scored(make, step, mode):
    """In `colocate_async` requests are in flight, which would be sampled with the noise that is being measured."""
    made = make(trainer_mode=mode, target_kl=1e-2)
    for number in range(1, 5):
        made.server.calls.clear()
        step(made)
        kinds = [call if isinstance(call, str) else call[0] for call in made.server.calls]
        scores = number in (2, 3, 4)  # a search, the first step of a stage, and the next search
        assert ("score" in kinds) == scores
        assert ("abort" in kinds) == (scores and mode == "colocate_async")
        if "abort" in kinds:
            # Nothing changes before, and the engine answers after.
            assert kinds[:3] == ["abort", "resume", "score"]
            assert (kinds.count("abort"), kinds.count("resume")) == (1, 1)


def test_tokens_that_nobody_sampled_do_not_count(make, step):
    """A tool's answer between two turns."""
    mask = torch.ones(NUM_ANSWERS, LENGTH)
    mask[:, 10:] = 0
    few, all_of_them = (step(make(start=2, sigma_start=0.1), given)["aqn/kl"] for given in (mask, None))
    assert few != all_of_them
    assert few == pytest.approx(all_of_them, rel=0.3)


def test_a_batch_without_a_token_to_score_leaves_both_to_the_next_step(make, step, caplog):
    made = make(start=1, target_kl=1e-2)
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        first = step(made, torch.zeros(NUM_ANSWERS, LENGTH))
    assert ("aqn/kl" in first, made.run.searched) == (False, {})
    (told,) = [message for message in caplog.messages if "no sigma was found yet" in message]
    assert told.startswith("aqn: step 3 has no noise")
    second = step(made)
    assert (second["aqn/sigma"], second["aqn/noisy_norms"]) == (0.0, 0)
    assert made.run.searched.keys() == {1}
    assert step(made)["aqn/kl"] == pytest.approx(1e-2, rel=0.2)
    resumed = make(start=2, sigma_start=0.1)
    masked, seen = step(resumed, torch.zeros(NUM_ANSWERS, LENGTH)), step(resumed)
    assert ["aqn/kl" in metrics for metrics in (masked, seen)] == [False, True]


@pytest.mark.parametrize("target", [1e-3, 2e-2])
def test_a_sigma_is_found_for_each_stage_in_the_step_before_it(make, step, target):
    made = make(target_kl=target, sigma_start=1e-2, sigma_end=1e-2)
    seen = [step(made) for _ in range(8)]
    assert [metrics["aqn/sigma"] > 0 for metrics in seen] == [False, False, *[True] * 6]
    assert made.run.searched.keys() == {1, 2, 3}
    for at in (3, 5, 7):
        assert seen[at - 1]["aqn/kl"] == pytest.approx(target, rel=0.2)
        assert exact_kl(made.server, seen[at - 1]["aqn/sigma"], at) == pytest.approx(target, rel=0.15)
    assert made.run.searched[2][1] < 0.6 * made.run.searched[1][1]  # the model has become more sensitive
    tried = [call for call in made.server.calls if isinstance(call[0], float) and call[0]]
    assert {at for _, at in tried} == {3, 4, 5, 6, 7, 8}
    assert len(tried) <= 6 + 3 * 5 + 3  # six steps with noise, few tries before each stage, and back from them


def test_the_noise_falls_from_the_sigma_that_was_found_as_the_schedule_does(make, step):
    made = make(target_kl=1e-2, sigma_start=1e-2, sigma_end=1e-3)
    seen = [step(made) for _ in range(8)]
    sigmas = [seen[at - 1]["aqn/sigma"] for at in (3, 5, 7)]
    assert [sigma / made.run.searched[stage][1] for stage, sigma in enumerate(sigmas, 1)] == pytest.approx(
        [1, 0.1**0.5, 0.1]
    )
    kls = [seen[at - 1]["aqn/kl"] for at in (3, 5, 7)]
    assert kls == pytest.approx([1e-2, 1e-3, 1e-4], rel=0.25)


def test_a_resumed_run_goes_on_with_the_sigma_that_was_found(make, step):
    made = make(target_kl=1e-2)
    seen = [step(made) for _ in range(4)]
    resumed = make(start=3, target_kl=1e-2)
    assert resumed.server.sigma == seen[3]["aqn/sigma"] == made.run.searched[1][1]
    assert step(resumed)["aqn/sigma"] == seen[3]["aqn/sigma"]
    at_once = make(start=2, target_kl=1e-2)  # the checkpoint of the step that searched
    assert step(at_once)["aqn/sigma"] == seen[2]["aqn/sigma"]


def test_a_resumed_run_that_lacks_a_sigma_takes_one_step_to_find_it(make, step, tmp_path, caplog):
    made = make(target_kl=1e-2)
    for _ in range(4):
        step(made)
    for path in tmp_path.glob("*/verl_qerl_aqn.json"):
        path.unlink()
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        resumed = make(start=2, target_kl=1e-2)
    assert (
        "aqn: step 3 has no noise, since no sigma was found yet for its stage: aqn.target_kl=0.01 needs answers to"
        " score, and has this step's." in caplog.messages
    )
    first, second = step(resumed), step(resumed)
    assert (first["aqn/sigma"], first["aqn/noisy_norms"]) == (0.0, 0)
    assert resumed.run.searched[1] == (4, pytest.approx(second["aqn/sigma"]))
    assert second["aqn/kl"] == pytest.approx(1e-2, rel=0.2)


def test_a_target_out_of_reach_names_the_bound(make, step, caplog):
    made = make(start=1, target_kl=1e-2)
    made.server.log_probs = lambda: Server().log_probs()  # noise changes nothing
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        metrics = step(made)
        assert made.run.searched == {1: (3, 1.0)}
    assert metrics["aqn/sigma"] == 0.0
    assert (
        "aqn.target_kl=0.01 is out of reach in stage 1: at the bound sigma=1 the noise causes KL=0. That sigma is used."
        " Set another `+aqn.target_kl=...`." in caplog.messages
    )


def test_a_target_that_no_try_meets_is_told(make, step, caplog):
    made = make(start=1, target_kl=1e-2)

    def all_or_nothing():
        other = Server()
        other.step, other.sigma = made.server.step, float(made.server.sigma > 0.03)
        return other.log_probs()

    made.server.log_probs = all_or_nothing
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        step(made)
    (told,) = (message for message in caplog.messages if "was not met" in message)
    assert told.startswith("aqn.target_kl=0.01 was not met in stage 1: the nearest of ")


def test_noise_below_a_step_of_float32_ends_no_run(make, step):
    made = make(sigma_start=0.1, sigma_end=1e-9)
    weights = {name: torch.full((64,), size) for name, size in NORMS.items()}

    def reached(sigma):
        noisy = (noisy_weight(clean, draw_noise(0, 1, name, 64), sigma, "additive") for name, clean in weights.items())
        return [sum(bool((one != clean).any()) for one, clean in zip(noisy, weights.values(), strict=True))] * 2

    made.server.noisy_norms = reached
    assert [step(made)["aqn/noisy_norms"] for _ in range(8)] == [0, 0, 4, 4, 4, 4, 0, 0]


@pytest.mark.parametrize(
    ("start", "answers", "told"),
    [
        (2, [4, 3], "the noise does not act: at the end of sampling step 3 with sigma=0.01, 3 of 4 norms differ"),
        (2, [0, 0], "the noise does not act: at the end of sampling step 3 with sigma=0.01, 0 of 4 norms differ"),
        (0, [0, 1], "the noise is not gone: at the end of sampling step 1 with sigma=0, 1 of 4 norms differ"),
    ],
    ids=["one-worker", "nowhere", "left"],
)
def test_noise_that_does_not_reach_the_norms_or_stays_in_them_ends_the_run(make, step, start, answers, told):
    made = make(start=start)
    made.server.noisy_norms = lambda sigma: answers
    with pytest.raises(RuntimeError) as caught:
        step(made)
    assert str(caught.value).startswith(told)
    assert "sleep" not in made.log


def test_the_size_of_the_noise_is_told_for_each_target(make, step, caplog):
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        made = make(start=2)
    assert [message for message in caplog.messages if "sigma_start" in message] == [
        "aqn: sigma_start=0.01 is 0.0067, 0.013, 0.02 (min, median, max) of the root mean square of a norm's weights,"
        f" over 2 norms {kind}."
        for kind in ("input_layernorm", "post_attention_layernorm")
    ]
    found = {name: value for name, value in step(made).items() if "relative" in name}
    assert found == pytest.approx(
        {
            "aqn/relative_sigma": (0.02 + 0.01 / 1.5) / 2,
            "aqn/relative_sigma_min": 0.01 / 1.5,
            "aqn/relative_sigma_max": 0.02,
        }
    )
    relative = step(make(start=2, mode="relative"))
    assert relative["aqn/relative_sigma"] == relative["aqn/relative_sigma_max"] == 0.01


@pytest.mark.parametrize(
    ("sigma", "mode", "told"),
    [
        (2e-4, "additive", "so little may do nothing"),
        (0.2, "additive", "so much may destroy the model"),
        (5e-4, "relative", "so little may do nothing"),
        (0.5, "multiplicative", "so much may destroy the model"),
        (1e-2, "additive", None),
        (0.1, "relative", None),
    ],
)
def test_an_unusual_size_is_warned_of(make, caplog, sigma, mode, told):
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        make(sigma_start=sigma, sigma_end=1e-5, mode=mode)
    warned = [message for message in caplog.messages if "Usual is 0.001 to 0.1" in message]
    assert [told in message for message in warned] == ([] if told is None else [True])


def test_a_model_that_takes_images_is_not_scored(make, step, caplog, monkeypatch):
    monkeypatch.setattr(Base, "processor", object(), raising=False)
    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        made = make(start=2)
    assert any("aqn/kl is not measured: this model takes images" in message for message in caplog.messages)
    metrics = step(made)
    assert "aqn/kl" not in metrics
    assert metrics["aqn/noisy_norms"] == 4
    with pytest.raises(ValueError, match=r"^aqn\.target_kl=0\.01 does not go together with a model that takes images"):
        make(target_kl=0.01)


def test_what_the_engine_cannot_score_is_told_once_and_ends_a_search(make, step, caplog):
    class Blind(Server):
        def _generate(self, **request):
            return SimpleNamespace(extra_fields={})

    with caplog.at_level(logging.WARNING, logger=noise_effect.__name__):
        made = make(start=2, sigma_start=0.1)
        made.server = Blind()
        set_noise(made.run, 0.1, 3)
        seen = [step(made) for _ in range(3)]
    assert not any("aqn/kl" in metrics for metrics in seen)
    (told,) = [message for message in caplog.messages if "not measured" in message]
    assert told.startswith("aqn/kl is not measured: the rollout did not score the tokens it was given: 0 answers for")
    searching = make(start=1, target_kl=0.01)
    searching.server = Blind()
    with pytest.raises(UnscoredError, match=r"Leave out \+qerl\.gate\.mismatch_sample and \+aqn\.target_kl\.$"):
        step(searching)


def test_without_noise_nothing_is_asked(make):
    made = make(enabled=False)
    assert made.server.calls == []
    made.global_steps += 1
    made.batch = None
    made.replay_buffer.sample()
    made.on_sample_end()
    made.on_step_end()
    assert made.server.calls == []
    assert made._consume_sync_metrics() == {"weight_sync/seconds": 0.5}
