"""The parts inside verl's own steps, with servers that score by a table (with vLLM: tests/e2e; alone: tests/algos)."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from qerl_testing import load_beside, run_config
from verl.utils.config import validate_config

from verl_qerl.verl_plugin.config.apply import prepare
from verl_qerl.verl_plugin.rollout.engine_scores import answer_log_probs
from verl_qerl.verl_plugin.trainer import mismatch_parts

steps = load_beside(__file__, "scored_steps")
AQN, Server, scored_step = steps.AQN, steps.Server, steps.scored_step
PARTS, NO_GATE = "+qerl.gate.mismatch_sample=3", "+qerl.gate.max_initial_kl=null"
INT8 = ("+rollout=int8", "actor_rollout_ref.model.lora_rank=0")
BYPASS = "algorithm.rollout_correction.bypass_mode=True"


@pytest.fixture
def step(scored_step):
    """As `scored_step`, with the parts alone."""

    def run(*overrides, **options):
        metrics, servers = scored_step(*overrides, **options)
        return {name: value for name, value in metrics.items() if name.startswith("qerl/mismatch_")}, servers

    return run


def parts(**values):
    """Metrics of those parts alone, each moving every token alike; nine tokens (three sequences of three)."""
    whole = sum(values.values())
    named = {f"qerl/mismatch_{name}": abs(value) for name, value in values.items()}
    named |= {f"qerl/mismatch_{name}_share": value / whole for name, value in values.items()}
    return pytest.approx(named | {"qerl/mismatch_num_tokens": 9}, abs=1e-5)


def test_noise_shows_in_its_part_alone(step):
    metrics, servers = step(PARTS, *AQN, sampled=0.1)
    assert metrics == parts(noise=0.1, kernel=0.0)
    # Scored with the noise of the step, then without, and given it back before the engine sleeps.
    kinds = [
        call if isinstance(call, str) else call.get("sigma") if isinstance(call, dict) else "score"
        for call in servers[0].calls
    ]
    assert kinds == ["score", "score", 0.0, "clear", "score", "score", 0.1, "clear", "sleep"]
    assert servers[0].calls[6] == {"sigma": 0.1, "step": 5}
    assert [call for call in servers[1].calls if isinstance(call, tuple)] == [(0.1, 5), (0.0, 5)]  # one of three


def test_requests_in_flight_are_aborted_before_answers_are_scored(step):
    """As verl does in `colocate_async` before the engine sleeps, once more: these may have come since."""
    metrics, servers = step(PARTS, *AQN, "trainer.v1.trainer_mode=colocate_async", sampled=0.1)
    assert metrics == parts(noise=0.1, kernel=0.0)
    for server in servers:
        assert [call for call in server.calls if isinstance(call, str)] == [
            *("abort", "resume", "clear", "clear", "abort", "sleep")
        ]
        assert server.calls[:2] == ["abort", "resume"]


@pytest.mark.parametrize("draw", ["sequence", "token"])
def test_draws_that_no_score_repeats_show_as_noise(step, draw):
    own = (PARTS, *AQN, f"+aqn.draw={draw}")
    servers = [Server(0.2, own_draws=True)]
    assert step(*own, sampled=0.3, servers=servers)[0] == parts(kernel=0.2, noise=0.1)
    assert [call for call in servers[0].calls if isinstance(call, tuple)] == [(0.1, 5)] * 3
    assert [call for call in servers[0].calls if not isinstance(call, tuple)] == ["sleep"]  # noise stays as it is
    stale = {"versions": (3, 4) * 3, "servers": [Server(own_draws=True)]}
    assert step(*own, sampled=0.3, **stale)[0] == parts(staleness=0.3, noise=0.0, kernel=0.0)


def test_other_weights_of_the_rollout_show_as_kernel(step):
    wrong = [Server(0.2)]
    assert step(PARTS, sampled=0.2, servers=wrong)[0] == parts(kernel=0.2)
    assert step(PARTS, *AQN, sampled=0.3, servers=wrong)[0] == parts(kernel=0.2, noise=0.1)


def test_an_actor_that_differs_shows_as_kernel(step):
    assert step(PARTS, NO_GATE, actor=0.4)[0] == parts(kernel=0.4)


def test_in_bypass_mode_the_actor_is_asked(step):
    assert step(PARTS, NO_GATE, BYPASS, actor=0.4)[0] == parts(kernel=0.4)
    assert step(PARTS, NO_GATE, *AQN, BYPASS, sampled=0.1)[0] == parts(noise=0.1, kernel=0.0)


@pytest.mark.parametrize(
    ("options", "passes"), [((), 1), (INT8, 2), ((*INT8, *AQN), 2)], ids=["one", "rounded too", "with noise"]
)
def test_in_bypass_mode_parts_and_gate_share_the_passes_of_the_actor(scored_step, options, passes):
    move = {"rounded": 0.2, "sampled": 0.3 if AQN[0] in options else 0.2} if options else {}
    metrics, _ = scored_step(PARTS, BYPASS, *options, servers=[Server(move.get("rounded", 0.0))], **move)
    assert len(scored_step.passes) == passes
    assert len({tuple(keys) for keys in scored_step.passes}) == 1
    expected = move.get("sampled", 0.0)
    assert metrics["qerl/rollout_log_prob_abs_diff"] == pytest.approx(expected, abs=1e-5)


def test_in_bypass_mode_every_step_has_its_own_pass(scored_step):
    scored_step(PARTS, NO_GATE, BYPASS, sampled=(0.0, 0.0))
    assert len(scored_step.passes) == 2


def test_answers_of_older_weights_show_as_staleness(step):
    # Every second sequence is taken: 0, 2, 4.
    metrics, _ = step(PARTS, sampled=0.3, versions=(3, 4, 3, 4, 2, 4))
    assert metrics == parts(staleness=0.3, kernel=0.0)
    # The same difference without another version is arithmetic.
    assert step(PARTS, sampled=0.3)[0] == parts(kernel=0.3)
    assert step(PARTS, sampled=0.3, versions=(None,) * 6)[0] == parts(kernel=0.3)


@pytest.mark.parametrize(
    ("rounded", "server", "kl", "told"),
    [
        (0.2, 0.5, 0.0408, "kernel 0.3 (50%), quantization 0.2 (33%), noise 0.1 (17%)"),
        (0.3, 0.5, 0.0187, "quantization 0.3 (50%), kernel 0.2 (33%), noise 0.1 (17%)"),
    ],
    ids=["kernel", "quantization"],
)
def test_the_gate_tells_the_parts_of_the_difference_as_sampled(step, rounded, server, kl, told):
    options = (PARTS, *INT8, *AQN, "+qerl.gate.max_initial_kl=0.01")
    with pytest.raises(RuntimeError) as caught:
        step(*options, rounded=rounded, sampled=server + 0.1, servers=[Server(server)])
    assert str(caught.value) == (
        f"the rollout is not the actor's model: KL(rollout || actor)={kl} nats per token over 9 tokens of 3 answers"
        " scored without the noise (aqn.sigma is 0.1), with the actor's linears rounded as the rollout's are at step"
        f" 5. As sampled and taken apart over 9 tokens, in nats per token and share of the square: {told}. Accepted is"
        " at most qerl.gate.max_initial_kl=0.01. Check that both have the same weights and versions, or raise it by"
        " `+qerl.gate.max_initial_kl=...` (null switches the gate off)."
    )


def test_what_cannot_be_taken_apart_does_not_hide_the_sentence(step):
    with pytest.raises(RuntimeError, match=r"log-probs are not finite at 18 of 18 tokens at step 5, in 6 answers"):
        step(PARTS, sampled=float("nan"))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_rounded_weights_show_as_quantization(step, micro_batch):
    micro = f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro_batch}"
    metrics, _ = step(PARTS, *INT8, micro, rounded=0.2, sampled=0.2, servers=[Server(0.2)])
    assert metrics == parts(quantization=0.2, kernel=0.0)
    metrics, _ = step(PARTS, *INT8, *AQN, micro, rounded=0.1, sampled=0.3, servers=[Server(0.2)])
    assert metrics == parts(quantization=0.1, kernel=0.1, noise=0.1)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_actor_is_asked_for_what_its_ranks_can_share(step, scored_step, monkeypatch, micro_batch):
    seen = []
    original = mismatch_parts.score_actor

    def score(run, batch, keys, rounded):
        found = original(run, batch, keys, rounded)
        seen.append((keys, scored_step.passes[-1], found.shape[0]))
        return found

    monkeypatch.setattr(mismatch_parts, "score_actor", score)
    step(PARTS, NO_GATE, *INT8, f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro_batch}")
    ((keys, asked, count),) = seen
    assert (len(keys), asked[:3], len(asked), len(set(asked)), count) == (3, keys, 4, 4, 3)  # two ranks


def test_without_noise_each_sequence_is_scored_once(step):
    metrics, servers = step(PARTS, servers=[Server()])
    assert servers[0].calls == [(None, 5)] * 3 + ["sleep"]
    assert metrics["qerl/mismatch_kernel"] == pytest.approx(0, abs=1e-6)
    assert "qerl/mismatch_noise" not in metrics


def test_an_answer_that_fills_the_context_is_scored_but_for_its_end(step):
    long = {f"{uid}_0_0": ([5, 6, 7, 8], [1, 2, 3, 4]) for uid in range(2)}
    metrics, servers = step(PARTS, NO_GATE, sampled=-0.5, sequences=long, versions=(4, 4), servers=[Server()])
    assert [call[1] for call in servers[0].calls[:-1]] == [7, 7]
    assert metrics["qerl/mismatch_num_tokens"] == 2 * 2  # the third does not count, the fourth has no score
    assert metrics["qerl/mismatch_kernel"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("overrides", [(), (*AQN, NO_GATE), (f"{PARTS[:-1]}0",)], ids=["stock", "aqn", "zero"])
def test_off_it_asks_nothing(step, overrides):
    metrics, servers = step(*overrides, sampled=0.01)
    assert metrics == {}
    assert servers[0].calls == ["sleep"]


def test_what_the_server_returns_is_checked():
    fields = {"prompt_ids": [[6], [7], [8], [0]], "prompt_logprobs": [[-1.0], [-2.0], [-3.0], [0.0]]}
    assert answer_log_probs(fields, [5, 6], [7, 8]).tolist() == [-2.0, -3.0]
    cut = answer_log_probs(fields, [5, 6], [7, 8, 9])
    assert cut[:2].tolist() == [-2.0, -3.0]
    assert cut[2].isnan()
    for wrong in ({}, fields | {"prompt_ids": [[6], [9], [8], [0]]}):
        with pytest.raises(RuntimeError, match="the rollout did not score the tokens it was given"):
            answer_log_probs(wrong, [5, 6], [7, 8])


BAD = {
    (
        "actor_rollout_ref.rollout.temperature=0.9",
    ): r"^actor_rollout_ref\.rollout\.temperature=0\.9 does not .* Accepted is 1\.0",
    (
        "actor_rollout_ref.rollout.top_p=0.9",
    ): r"top_p=0\.9 does not go together with \+qerl\.gate\.mismatch_sample=3: it compares",
    ("actor_rollout_ref.rollout.top_k=20",): r"top_k=20 does not .* Accepted is -1 or 0",
    ("actor_rollout_ref.rollout.name=sglang",): r"name=sglang does not .* Accepted is vllm",
    ("actor_rollout_ref.rollout.disaggregation.enabled=True",): r"enabled=True does not .* is not known to score them",
    ("trainer.v1.trainer_mode=separate_async",): r"separate_async does not .* Accepted is sync or colocate_async",
    ("actor_rollout_ref.rollout.calculate_log_probs=False",): r"calculate_log_probs=False does not .* Accepted is True",
}


@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[0])
def test_where_it_cannot_be_had_is_refused_on_the_driver(overrides):
    config = run_config(PARTS, *overrides)
    with pytest.raises(ValueError, match=BAD[overrides]):
        prepare(config)
    if "sglang" not in overrides[0]:
        with pytest.raises(ValueError, match=BAD[overrides]):
            validate_config(config=config, use_reference_policy=False, use_critic=False)
