"""The limits of the difference in steps with noise, and where the rollout is quantized at every sync."""

import logging

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from qerl_testing import load_beside

from verl_qerl.verl_plugin.trainer import mismatch

steps = load_beside(__file__, "scored_steps")
AQN, Server, scored_step = steps.AQN, steps.Server, steps.scored_step
INT8 = ("+rollout=int8", "actor_rollout_ref.model.lora_rank=0")
NVFP4 = ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=0")
ADAPTER = ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8")
CLEAN = "qerl/clean_kl_k3"
SAMPLED = "qerl/rollout_kl_k3"
ABOVE = 1.0  # a difference of so much is above every limit here: KL 0.37


@pytest.fixture
def told(caplog):
    """What the gate says, but for the floor of its model."""
    caplog.set_level(logging.WARNING, logger=mismatch.__name__)

    def messages():
        said = [record.getMessage() for record in caplog.records if record.name == mismatch.__name__]
        return [message for message in said if "this is the floor of this model" not in message]

    return messages


def kinds(server):
    return [
        call if isinstance(call, str) else call["sigma"] if isinstance(call, dict) else "score" for call in server.calls
    ]


class NoisyServer(Server):
    """Its noise, whatever sigma, moves every score by 1."""

    def score(self, tokens):
        return steps.log_prob(tokens) + self.weights + (ABOVE if self.sigma else 0.0)


@pytest.mark.parametrize("ours", [AQN, (*ADAPTER, *AQN)], ids=["bf16", "nvfp4"])
def test_a_run_that_is_resumed_in_a_noisy_stage_goes_on(scored_step, told, caplog, ours):
    metrics, (server,) = scored_step(*ours, sampled=ABOVE, servers=[NoisyServer()])
    assert metrics[SAMPLED] > 0.3
    assert metrics[CLEAN] == pytest.approx(0, abs=1e-9)
    # Scored without noise, and given it back before the engine sleeps.
    assert kinds(server) == [0.0, "clear", *["score"] * 6, 0.1, "clear", "sleep"]
    assert not told()
    assert "over 18 tokens of 6 answers scored without the noise (aqn.sigma is 0.1) at step 5, mean" in caplog.text


def test_wrong_weights_stop_it_there_and_the_sentence_names_sigma(scored_step):
    with pytest.raises(RuntimeError) as caught:
        scored_step(*ADAPTER, *AQN, sampled=ABOVE + 0.3, servers=[NoisyServer(0.3)])
    assert str(caught.value) == (
        "the rollout is not the actor's model: KL(rollout || actor)=0.0408 nats per token over 18 tokens of 6 answers"
        " scored without the noise (aqn.sigma is 0.1) at step 5. Accepted is at most qerl.gate.max_initial_kl=0.02."
        " Check that both have the same weights and versions, or raise it by `+qerl.gate.max_initial_kl=...` (null"
        " switches the gate off)."
    )


@pytest.mark.parametrize(
    "obstacle", ["actor_rollout_ref.rollout.temperature=0.9", "images"], ids=["temperature", "images"]
)
def test_where_the_engine_cannot_score_a_noisy_step_is_not_looked_at_which_is_said_once(scored_step, told, obstacle):
    class Blind(NoisyServer):
        def _generate(self, prompt_ids, sampling_params, request_id):
            output = super()._generate(prompt_ids, sampling_params, request_id)
            output.extra_fields = {}
            return output

    images = obstacle == "images"
    overrides = () if images else (obstacle,)
    server = Blind() if images else NoisyServer()
    found, _ = scored_step(*AQN, *overrides, sampled=(ABOVE, ABOVE, ABOVE), servers=[server])
    assert all(SAMPLED in metrics and CLEAN not in metrics for metrics in found)
    (message,) = told()
    assert message.startswith("the limits of KL(rollout || actor) do not hold in steps with noise: ")
    assert ("text alone" if images else "temperature=0.9 (accepted is 1.0)") in message
    scores = ["score"] * 6 if images else []
    first = [0.0, "clear", *scores, 0.1, "clear"] if images else []
    assert kinds(server) == [*first, "sleep", "sleep", "sleep"]


def test_noise_that_is_above_the_limit_has_the_next_step_scored_without_it(scored_step, told):
    # Steps 3 (clean) to 6.
    found, (server,) = scored_step(*AQN, sampled=(0.0, ABOVE, ABOVE, 0.01), servers=[NoisyServer()])
    assert [CLEAN in metrics for metrics in found] == [False, False, True, False]
    look = [0.0, "clear", *["score"] * 6, 0.1, "clear"]
    assert kinds(server) == ["sleep", "sleep", *look, "sleep", *look, "sleep"]
    assert not told()


def test_an_adapter_that_stops_arriving_is_told_through_the_noise(scored_step, told):
    options = (*ADAPTER, *AQN, "+qerl.gate.max_initial_kl=null", "+qerl.gate.max_kl=0.1")
    with pytest.raises(RuntimeError) as caught:
        scored_step(*options, sampled=(ABOVE,) * 4, servers=[NoisyServer(0.6)])
    # Of steps 3 to 6 the first has the gate alone, the second no score without its noise.
    (message,) = told()
    assert "(aqn.sigma is 0.1) at step 5 is above qerl.gate.max_kl=0.1." in message
    assert str(caught.value).startswith(
        "the rollout is not the actor's model any more: KL(rollout || actor)=0.149 nats per token over 18 tokens of 6"
        " answers scored without the noise (aqn.sigma is 0.1) at step 6, 0.149 at the one before. Accepted"
    )


@pytest.mark.parametrize("ours", [INT8, NVFP4, (*NVFP4, *AQN)], ids=["int8", "nvfp4", "noise"])
def test_what_the_format_costs_this_model_is_no_error(scored_step, told, ours):
    noise = ABOVE if AQN[0] in ours else 0.0
    for sampled in (0.7 + noise, (0.7,) * 3 + (0.7 + noise,)):
        scored_step(*ours, rounded=0.7, sampled=sampled, servers=[NoisyServer(0.7)])
    found, _ = scored_step(*ours, rounded=0.7, sampled=(0.7, 0.7), servers=[NoisyServer(0.7)])
    assert found[0][SAMPLED] > 0.15
    assert found[0][CLEAN] == pytest.approx(0, abs=1e-9)
    assert not told()


def test_a_rollout_that_is_not_the_rounded_actor_stops_the_run(scored_step):
    for sampled in (0.2, 0.9):  # as far from the actor, and further
        with pytest.raises(RuntimeError) as caught:
            scored_step(*NVFP4, rounded=0.5, sampled=sampled)
        assert " of 6 answers, with the actor's linears rounded as the rollout's are at step 5. Accepted" in str(
            caught.value
        )
    options = (*NVFP4, "+qerl.gate.max_initial_kl=null", "+qerl.gate.max_kl=0.03")
    with pytest.raises(
        RuntimeError, match=r"at step 6, 0\.0408 at the one before\. Accepted is at most qerl\.gate\.max_kl"
    ):
        scored_step(*options, rounded=0.5, sampled=(0.5, 0.8, 0.8))


def test_answers_without_a_token_to_score_leave_the_gate_to_the_next_step(scored_step, told):
    """One token behind a prompt that fills the engine's context but for it: scoring it needs room for another."""
    full = {"0_0_0": ([5] * 7, [8]), "1_0_0": ([6] * 7, [9])}
    found, _ = scored_step(*ADAPTER, *AQN, sampled=(ABOVE,) * 2, servers=[NoisyServer(0.3)], sequences=full)
    assert [CLEAN in metrics for metrics in found] == [False, False]
    (message,) = told()
    assert message == (
        "qerl.gate.max_initial_kl=0.02 did not look at step 5, and looks at the next: no token of its answers is left"
        " to score. They are masked, or end where rollout.max_model_len does. For the latter raise it by 1."
    )
    some = full | {f"{uid}_0_0": ([5], [7, 8]) for uid in (2, 3)}
    with pytest.raises(RuntimeError, match=r"over 4 tokens of 4 answers scored without the noise .* at step 5\."):
        scored_step(*ADAPTER, *AQN, sampled=(ABOVE,) * 2, servers=[NoisyServer(0.3)], sequences=some)
