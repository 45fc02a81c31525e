"""The gate inside verl's own `_compute_old_log_prob`, on batches as the TransferQueue hands them out."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import transfer_queue
from omegaconf import OmegaConf
from qerl_testing import load_beside, run_config
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils.config import validate_config

from verl_qerl.options.schema import LATER_STEPS, SAME_WEIGHTS_KL
from verl_qerl.options.schema import Gate as GateOptions
from verl_qerl.verl_plugin.trainer import mismatch
from verl_qerl.verl_plugin.trainer.mismatch import Gate, gate_options

fakes, scored_steps = load_beside(__file__, "transfer_queue_fakes"), load_beside(__file__, "scored_steps")
scored_step = scored_steps.scored_step
Queue, nested = fakes.Queue, fakes.nested
NVFP4 = ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8")
ALL_WEIGHTS = "actor_rollout_ref.model.lora_rank=0"
AQN = ("+aqn.enabled=true",)
GATE = "+qerl.gate.max_initial_kl=0.1"
ROLLOUT = "actor_rollout_ref.rollout"
NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=False"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
KL, DIFFERENCE = "qerl/rollout_kl_k3", "qerl/rollout_log_prob_abs_diff"


@pytest.fixture
def step(bare_trainers, monkeypatch):
    """Makes a trainer of verl's registry, and runs its step from sampled answers to `old_log_probs`.

    The two answers have prompts of one token, and three and two tokens; the third token of the first does not count.
    """

    def make(*overrides):
        config = run_config(*overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.global_steps, trainer.total_training_steps, trainer.local_trigger_step = 1, 10, 0
        trainer.steps_per_epoch = 10
        workers = {"compute_log_prob": lambda batch: batch, "save_model_to_cpu": lambda number: None}
        trainer.actor_rollout_wg = SimpleNamespace(**workers)
        return trainer

    def run(trainer, rollout, actor, masks=([1, 1, 0], [1, 1]), versions=(None, None)):
        # The actor's log-probs cover the prompt and are one ahead of the tokens.
        shifted = nested([[*row, 9.0] for row in actor])
        fields = {
            "log_probs": shifted,
            "entropy": shifted,
            "responses": nested([range(len(row)) for row in actor]),
            "response_mask": nested(masks),
            "rollout_log_probs": nested(rollout),
        }
        queue = Queue(fields)
        monkeypatch.setattr(trainer_base, "tq", queue)
        monkeypatch.setattr(transfer_queue, "kv_batch_get", queue.kv_batch_get)
        metrics = {}
        tags = [{} if version is None else {"min_global_steps": version} for version in versions]
        batch = KVBatchMeta(partition_id="train", keys=["a", "b"], tags=tags)
        found = trainer._compute_old_log_prob(batch, metrics=metrics)
        assert found.keys == ["a", "b"]
        return metrics

    return SimpleNamespace(make=make, run=run)


ACTOR = ([-1.0, -2.0, -3.0], [-1.0, -1.0])
CLOSE = ([-1.0, -2.1, math.nan], [-1.0, -1.0])  # d = 0.1 at one of four tokens
FAR = ([-1.0, -2.0, math.nan], [-1.0, -2.0])  # d = 1
KL_CLOSE, KL_FAR = (math.exp(0.1) - 1.1) / 4, (math.e - 2) / 4


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("overrides", [NVFP4, AQN, (*NVFP4, *AQN), (GATE,)], ids=["nvfp4", "aqn", "both", "explicit"])
def test_metrics_of_every_step(step, overrides, mode):
    trainer = step.make(*overrides, f"trainer.v1.trainer_mode={mode}")
    assert any(isinstance(feature, Gate) for feature in trainer.features)
    for actor, rollout, kl, difference in ((ACTOR, CLOSE, KL_CLOSE, 0.025), (ACTOR, FAR, KL_FAR, 0.25)):
        metrics = step.run(trainer, rollout, actor)
        assert metrics[KL] == pytest.approx(kl, rel=1e-5)
        assert metrics[DIFFERENCE] == pytest.approx(difference, rel=1e-5)
        assert "actor/entropy" in metrics  # verl's own stay


@pytest.mark.parametrize(
    ("rollout", "actor"), [(FAR, ACTOR), (CLOSE, ([-1.0, math.nan, -3.0], [-1.0, -1.0]))], ids=["far", "nan"]
)
@pytest.mark.parametrize("start", [0, 7], ids=["first", "resumed"])
def test_garbage_stops_the_run_at_its_first_step(step, rollout, actor, start):
    trainer = step.make(*NVFP4)
    trainer.global_steps = start + 1
    with pytest.raises(RuntimeError) as caught:
        step.run(trainer, rollout, actor)
    kl = "0.18" if rollout is FAR else "nan"
    assert str(caught.value) == (
        f"the rollout is not the actor's model: KL(rollout || actor)={kl} nats per token over 4 tokens at step"
        f" {start + 1}. Accepted is at most qerl.gate.max_initial_kl=0.02. Check that both have the same weights and"
        " versions, or raise it by `+qerl.gate.max_initial_kl=...` (null switches the gate off)."
    )


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [(NVFP4, 0.02), (("+rollout=mxfp4", NVFP4[1]), 0.02), (("+rollout=int8", NVFP4[1]), 0.05),
     (("+rollout=nvfp4", ALL_WEIGHTS), 0.02), (("+rollout=int8", ALL_WEIGHTS), 0.05), (AQN, 0.05),
     ((*NVFP4, GATE), 0.1), ((*NVFP4, "+qerl.gate.mismatch_sample=1"), 0.02),
     ((*NVFP4, "+qerl.gate.max_initial_kl=null"), None)],
    ids=["nvfp4", "mxfp4", "int8", "all weights", "all weights, int8", "aqn", "explicit", "other option", "off"],
)  # fmt: skip
def test_the_limits_are_lower_where_both_sides_multiply_by_the_same_weights(overrides, limit):
    gate = gate_options(run_config(*overrides))
    assert gate.max_initial_kl == limit
    assert gate.max_kl == (None if limit is None else LATER_STEPS * limit)
    for value in (1.5, None):
        given = f"+qerl.gate.max_kl={'null' if value is None else value}"
        assert gate_options(run_config(*overrides, given)) == replace(gate, max_kl=value)


MODES = ("sync", "colocate_async")
LATER = "+qerl.gate.max_kl=0.1"
SEPARATE = ("+qerl.gate.max_initial_kl=0.05", "trainer.v1.trainer_mode=separate_async")
SEPARATE += (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=nccl")


@pytest.mark.parametrize("mode", MODES)
def test_a_later_step_above_the_limit_is_warned_of_and_a_second_one_stops_the_run(step, caplog, mode):
    trainer = step.make(*NVFP4, LATER, f"trainer.v1.trainer_mode={mode}")
    for number, rollout in enumerate((CLOSE, FAR, CLOSE, FAR), 1):
        trainer.global_steps = number
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
            assert KL in step.run(trainer, rollout, ACTOR)
        if rollout is FAR:
            (message,) = caplog.messages
            assert message == (
                f"KL(rollout || actor)=0.18 nats per token over 4 tokens at step {number} is above"
                " qerl.gate.max_kl=0.1. The run stops when the next step is too. Check that both have the same weights"
                " and versions, or raise the limit by `+qerl.gate.max_kl=...` (null: it never stops the run)."
            )
        else:
            assert not [message for message in caplog.messages if "above" in message]
    trainer.global_steps = 5
    with pytest.raises(RuntimeError) as caught:
        step.run(trainer, FAR, ACTOR)
    assert str(caught.value) == (
        "the rollout is not the actor's model any more: KL(rollout || actor)=0.18 nats per token over 4 tokens at step"
        " 5, 0.18 at the one before. Accepted is at most qerl.gate.max_kl=0.1. Check that both have the same weights"
        " and versions, or raise the limit by `+qerl.gate.max_kl=...` (null: it never stops the run)."
    )


@pytest.mark.parametrize(
    "overrides",
    [("+qerl.gate.max_kl=null",), ("+qerl.gate.max_kl=0.19",), ("+qerl.gate.max_initial_kl=null",),
     SEPARATE],
    ids=["off", "higher", "gate off", "separate_async"],
)  # fmt: skip
def test_later_steps_that_are_accepted(step, caplog, overrides):
    trainer = step.make(*(() if overrides == SEPARATE else NVFP4), *overrides)
    with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
        for number, rollout in enumerate((CLOSE, FAR, FAR), 1):
            trainer.global_steps = number
            assert KL in step.run(trainer, rollout, ACTOR)
    assert not [message for message in caplog.messages if "above" in message]


def test_answers_that_older_weights_began_do_not_count(step, caplog):
    trainer = step.make(*NVFP4, LATER, "trainer.v1.trainer_mode=colocate_async")
    step.run(trainer, CLOSE, ACTOR)
    trainer.global_steps = 5
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
        # The second answer is the one that is far.
        for versions in ((4, 3), (None, 3)):
            assert step.run(trainer, FAR, ACTOR, versions=versions)[KL] == pytest.approx(KL_FAR, rel=1e-5)
        assert not caplog.messages
        step.run(trainer, FAR, ACTOR, versions=(3, 4))
    assert "over 2 tokens at step 5 is above" in caplog.text


OLDER = (
    "qerl.gate.{} did not look at step {}, and will not at steps like it: it looks at answers that the present weights"
    " began, and older ones began all 2. Set trainer.v1.colocate_async.num_warmup_batches=0 to have such answers, or"
    " watch qerl/rollout_kl_k3, which contains how far the weights have moved since."
)


def test_steps_whose_answers_older_weights_began_are_told_once(step, caplog):
    trainer = step.make(*NVFP4, LATER, "trainer.v1.trainer_mode=colocate_async")
    step.run(trainer, CLOSE, ACTOR, versions=(0, 0))
    caplog.clear()
    for number in (2, 3):
        trainer.global_steps = number
        assert KL in step.run(trainer, FAR, ACTOR, versions=(number - 2,) * 2)
    assert of_the_gate(caplog) == [OLDER.format("max_kl=0.1", 2)]


def test_each_limit_tells_it(step, caplog):
    trainer = step.make(*NVFP4, LATER, "trainer.v1.trainer_mode=colocate_async")
    trainer.global_steps = 4  # resumed, with answers that were begun before
    step.run(trainer, CLOSE, ACTOR, versions=(2, 2))
    trainer.global_steps = 5
    step.run(trainer, CLOSE, ACTOR, versions=(4, 4))
    trainer.global_steps = 6
    step.run(trainer, CLOSE, ACTOR, versions=(4, 4))
    blind = [message.split("=")[0] for message in of_the_gate(caplog) if "did not look" in message]
    assert blind == ["qerl.gate.max_initial_kl", "qerl.gate.max_kl"]


def test_a_gate_that_waits_for_answers_of_present_weights_says_so(step, caplog):
    trainer = step.make(*NVFP4, "trainer.v1.trainer_mode=colocate_async")
    trainer.global_steps = 4
    step.run(trainer, FAR, ACTOR, versions=(2, 2))
    assert of_the_gate(caplog) == [OLDER.format("max_initial_kl=0.02", 4)]
    with pytest.raises(RuntimeError, match=r"^the rollout is not the actor's model: "):
        step.run(trainer, FAR, ACTOR, versions=(2, 3))


@pytest.mark.parametrize("options", [("+qerl.gate.max_kl=null",), SEPARATE], ids=["off", "separate_async"])
def test_without_a_limit_older_answers_are_nothing_to_tell(step, caplog, options):
    trainer = step.make(*(() if options == SEPARATE else NVFP4), *options)
    step.run(trainer, CLOSE, ACTOR, versions=(0, 0))
    caplog.clear()
    trainer.global_steps = 2
    step.run(trainer, FAR, ACTOR, versions=(0, 0))
    assert not of_the_gate(caplog)


def of_the_gate(caplog):
    """What the gate says; other parts of a run warn too."""
    return [record.getMessage() for record in caplog.records if record.name == mismatch.__name__]


def test_the_first_step_tells_the_floor_of_the_model(step, caplog):
    trainer = step.make(*NVFP4)
    with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
        for _ in range(2):
            step.run(trainer, CLOSE, ACTOR)
    assert of_the_gate(caplog) == [
        "KL(rollout || actor)=0.00129 nats per token over 4 tokens at step 1, mean absolute difference 0.025: both hold"
        " the same weights, so this is the floor of this model, what arithmetic alone makes. Later steps without noise"
        " stay near it. Accepted was at most qerl.gate.max_initial_kl=0.02."
    ]


@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("overrides", [(), ("+qerl.gate.max_initial_kl=null",)], ids=["gate", "no gate"])
def test_log_probs_that_are_no_numbers_stop_a_run_at_any_step(step, value, overrides):
    trainer = step.make(*NVFP4, *overrides)
    step.run(trainer, CLOSE, ACTOR)
    trainer.global_steps = 5
    with pytest.raises(RuntimeError) as caught:
        step.run(trainer, ([-1.0, -2.0, 0.0], [-1.0, value]), ACTOR)
    assert str(caught.value) == (
        "the rollout's log-probs are not finite at 1 of 4 tokens at step 5, in 1 answers, first at token 1 of one."
        " Finite ones are needed: its weights or its kernels are broken. Try"
        " `+qerl.rollout.linear=stock`, and report this."
    )


def test_the_limit_is_the_users(step):
    step.run(step.make(*NVFP4, "+qerl.gate.max_initial_kl=0.18"), FAR, ACTOR)
    with pytest.raises(RuntimeError, match=r"Accepted is at most qerl\.gate\.max_initial_kl=0\.179\."):
        step.run(step.make(*NVFP4, "+qerl.gate.max_initial_kl=0.179"), FAR, ACTOR)
    metrics = step.run(step.make(*NVFP4, "+qerl.gate.max_initial_kl=null"), FAR, ACTOR)
    assert metrics[KL] == pytest.approx(KL_FAR, rel=1e-5)


def test_a_batch_without_tokens_leaves_the_gate_for_the_next(step):
    trainer = step.make(*NVFP4)
    assert KL not in step.run(trainer, FAR, ACTOR, masks=([0, 0, 0], [0, 0]))
    with pytest.raises(RuntimeError, match=r"^the rollout is not the actor's model"):
        step.run(trainer, FAR, ACTOR)


def test_a_stock_run_is_left_alone(step, caplog):
    with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
        stock, blind = step.make(), step.make(NO_LOG_PROBS)
    assert not caplog.messages
    assert not {name for name in step.run(stock, FAR, ACTOR) if name.startswith("qerl/")}
    assert not {name for name in step.run(blind, FAR, ACTOR) if name.startswith("qerl/")}


def test_where_it_cannot_look_it_says_so_once(step, caplog):
    with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
        trainer = step.make(*NVFP4, NO_LOG_PROBS)
        for _ in range(2):
            assert KL not in step.run(trainer, FAR, ACTOR)
    (message,) = of_the_gate(caplog)
    assert message.startswith("the gate at the first step cannot look, and qerl/rollout_* are not logged: ")
    assert NO_LOG_PROBS in message


MANY = {f"{uid}_0_0": ([5, 6], [7, uid, 9]) for uid in range(40)}


@pytest.mark.parametrize(("options", "num"), [((GATE,), 16), ((GATE, "+qerl.gate.mismatch_sample=5"), 5)], ids=str)
def test_in_bypass_mode_the_actor_scores_a_few_answers(scored_step, options, num):
    metrics, _ = scored_step(*options, BYPASS, actor=0.1, sequences=MANY)
    assert metrics[KL] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-4)
    assert metrics[DIFFERENCE] == pytest.approx(0.1, rel=1e-5)
    with pytest.raises(RuntimeError, match=rf"nats per token over {2 * num} tokens at step 5\..* Accepted is at most"):
        scored_step(*options, BYPASS, actor=0.5, sequences=MANY)


@pytest.mark.parametrize("options", [(GATE, BYPASS), ("+rollout=int8", "actor_rollout_ref.model.lora_rank=0")], ids=str)
def test_what_fills_a_batch_up_is_no_answer_to_score(scored_step, options):
    with pytest.raises(RuntimeError, match=r"nats per token over 20 tokens"):
        scored_step(*options, actor=0.5, rounded=0.5, sequences=MANY, padding=30)


@pytest.mark.parametrize(
    ("options", "looks"),
    [((), [True, False, True]), (("+qerl.gate.mismatch_sample=5",), [True, True, True])],
    ids=["gate", "parts"],
)
def test_in_bypass_mode_it_looks_at_the_first_step_and_at_one_of_some(scored_step, monkeypatch, options, looks):
    monkeypatch.setattr(mismatch, "_BYPASSED", 3)
    metrics, _ = scored_step(GATE, BYPASS, *options, sampled=(0.1, 0.1, 0.1))  # steps 4 to 6
    assert [KL in step for step in metrics] == looks


def test_in_bypass_mode_the_step_after_one_above_the_limit_is_looked_at(scored_step, monkeypatch):
    monkeypatch.setattr(mismatch, "_BYPASSED", 5)
    with pytest.raises(RuntimeError, match=r"model any more: .* at step 6, 0\.718 at the one before"):
        scored_step(GATE, BYPASS, sampled=(0.0, -1.0, -1.0))


@pytest.mark.parametrize("micro_batch", [3, 64])
def test_in_bypass_mode_the_actors_micro_batch_need_not_divide_the_batch(scored_step, micro_batch):
    micro = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={micro_batch}"  # verl has the actor score nothing
    assert scored_step(GATE, BYPASS, micro, actor=0.1, sequences=MANY)[0][DIFFERENCE] == pytest.approx(0.1, rel=1e-5)


def test_in_bypass_mode_what_verl_took_from_the_rollout_is_not_fetched_again(scored_step):
    scored_step(GATE, BYPASS, sequences=MANY)
    assert scored_step.fetched["old_log_probs"] == 0
    assert scored_step.fetched["rollout_log_probs"] == 40 + 40 + 16  # verl, the check, and what the actor scored


def test_in_bypass_mode_all_log_probs_of_the_rollout_have_to_be_finite(scored_step):
    with pytest.raises(RuntimeError, match=r"not finite at 80 of 80 tokens at step 5, in 40 answers"):
        scored_step(*NVFP4, BYPASS, sampled=math.nan, sequences=MANY)


@pytest.mark.parametrize("cut", [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20"])
def test_of_a_cut_distribution_there_are_metrics_and_no_gate(step, caplog, cut):
    with caplog.at_level(logging.WARNING, logger=mismatch.__name__):
        trainer = step.make(*NVFP4, cut)
        for _ in range(2):
            assert step.run(trainer, FAR, ACTOR)[KL] > SAME_WEIGHTS_KL
    (message,) = of_the_gate(caplog)
    assert message.startswith("the gate at the first step does not look, and qerl/rollout_* contain the cut of ")
    assert cut in message
    with pytest.raises(
        ValueError, match=rf"^{cut} does not go together with \+qerl\.gate\.max_initial_kl=0\.1: it compares"
    ):
        step.make(*NVFP4, cut, GATE)
    with pytest.raises(RuntimeError, match=r"^the rollout is not the actor's model"):
        step.run(step.make(*NVFP4, f"{ROLLOUT}.top_k=0"), FAR, ACTOR)


@pytest.mark.parametrize(
    ("overrides", "default"),
    [((), None), (NVFP4, GateOptions(SAME_WEIGHTS_KL, 0.1)), (AQN, GateOptions())],
    ids=["stock", "nvfp4", "aqn"],
)
def test_options_compose_from_the_command_line(overrides, default):
    assert gate_options(run_config(*overrides)) == default
    assert gate_options(run_config(GATE, *overrides)) == GateOptions(0.1, 0.5)
    assert gate_options(run_config("+qerl.gate.max_initial_kl=null", NO_LOG_PROBS, *overrides)) == GateOptions(
        None, None
    )
    assert gate_options(OmegaConf.create({})) is None


BAD = {
    (GATE, NO_LOG_PROBS): r"calculate_log_probs=False does not go together with \+qerl\.gate\.max_initial",
    (GATE, "trainer.use_v1=False"): r"^trainer\.use_v1=False does not go together",
    (LATER, NO_LOG_PROBS): r"does not go together with \+qerl\.gate\.max_kl=0\.1: it compares",
    (
        "+qerl.gate.kl=1",
    ): r"^unknown option qerl\.gate\.kl=1\. Known options are max_initial_kl, max_kl, mismatch_sample\.",
}


@pytest.mark.parametrize("ours", [(), NVFP4, AQN], ids=["stock", "nvfp4", "aqn"])
@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[-1])
def test_bad_input_is_refused_on_the_driver_and_by_the_trainer(step, overrides, ours):
    config = run_config(*overrides, *ours)
    with pytest.raises(ValueError, match=BAD[overrides]):
        validate_config(config=config, use_reference_policy=False, use_critic=False)
    with pytest.raises(ValueError, match=BAD[overrides]):
        step.make(*overrides, *ours)
