"""verl's rollout correction beside our metrics and gate, by verl's own steps from `old_log_probs` to its loss.

Two answers of one prompt, of which four tokens count. pi_actor / pi_rollout is 4 and 1/4 in the first, 1.5 and 1 in the
second; scores are 1 and 0, advantages +-1/2.
"""

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
import transfer_queue
from qerl_testing import load_beside, run_config
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

fakes = load_beside(__file__, "transfer_queue_fakes")
Queue, nested = fakes.Queue, fakes.nested
OPTIONS = (
    "+rollout=int8",
    "actor_rollout_ref.model.lora_rank=0",
    "+aqn.enabled=true",
    "algorithm.adv_estimator=grpo",
    "algorithm.norm_adv_by_std_in_grpo=False",
)
NO_GATE = "+qerl.gate.max_initial_kl=null"
CORRECTION = "algorithm.rollout_correction."
TOKEN = (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=2.0")
SEQUENCE = (f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold=1.2")
REJECT = (f"{CORRECTION}rollout_rs=token_k3", f"{CORRECTION}rollout_rs_threshold=1.0")
RATIOS = ([4.0, 0.25, 9.0], [1.5, 1.0])  # the third token does not count
K3 = [ratio - 1 - math.log(ratio) for ratio in (4.0, 0.25, 1.5, 1.0)]  # 1.61, 0.64, 0.09, 0


def sampled_batch():
    """What the agent loop and the actor have written; log-probs of the actor cover the prompt and are one ahead."""
    actor = ([-1.0, -2.0, -3.0], [-1.0, -1.0])
    mask = nested([[1, 1, 0], [1, 1]])
    rollout = [torch.tensor(row) - torch.tensor(ratio).log() for row, ratio in zip(actor, RATIOS, strict=True)]
    shifted = nested([[*row, 9.0] for row in actor])
    return {
        "uid": NonTensorStack("a", "a"),
        "prompts": nested([[0], [0]]),
        "responses": nested([[0, 1, 2], [0, 1]]),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": nested([[0.0, 1.0, 0.0], [0.0, 0.0]]),
        "rollout_log_probs": nested(rollout),
        "log_probs": shifted,
        "entropy": shifted,
    }


@pytest.fixture
def step(bare_trainers, monkeypatch):
    """Runs a trainer of verl's registry to the advantages, then the actor's loss at the weights that it had."""

    def run(*overrides):
        config = run_config(*OPTIONS, *overrides)
        trainer = get_trainer_cls("sync")(config)
        trainer.global_steps, trainer.total_training_steps, trainer.steps_per_epoch = 1, 2, 2
        workers = {"compute_log_prob": lambda batch: batch, "_dispatch_info": {"actor": [0]}}  # whose rounding is small
        trainer.actor_rollout_wg = SimpleNamespace(**workers)
        queue, metrics = Queue(sampled_batch()), {}
        monkeypatch.setattr(trainer_base, "tq", queue)
        monkeypatch.setattr(transfer_queue, "kv_batch_get", queue.kv_batch_get)
        batch = KVBatchMeta(partition_id="train", keys=["a_0_0", "a_1_0"], tags=[{}, {}])
        batch = trainer._compute_old_log_prob(batch, metrics=metrics)
        trainer._compute_advantage(batch, metrics=metrics)
        data = TensorDict({name: value for name, value in queue.fields.items() if name != "uid"}, batch_size=2)
        counted = int(data["loss_mask"].values().sum())  # by verl's engine
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=counted, global_batch_size=2)
        log_probs = data["log_probs"].values().clone().requires_grad_()
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, data["log_probs"].offsets())}
        loss, _ = ppo_loss(omega_conf_to_dataclass(config.actor_rollout_ref.actor), output, data)
        loss.backward()
        # [0:3] and [4:6]: what stands one ahead of the tokens
        return metrics, loss.item(), log_probs.grad[[0, 1, 2, 4, 5]].tolist(), data

    return run


def test_token_level_weights_enter_the_loss_once(step):
    metrics, loss, gradient, _ = step(NO_GATE, *TOKEN)
    # Weights 2 (of 4), 1/4; 1.5, 1. Four tokens.
    assert loss == pytest.approx(-(0.5 * (2 + 0.25) - 0.5 * (1.5 + 1)) / 4)
    assert gradient == pytest.approx([-0.5 * 2 / 4, -0.5 * 0.25 / 4, 0, 0.5 * 1.5 / 4, 0.5 / 4])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((2 + 0.25 + 1.5 + 1) / 4)


def test_sequence_level_weights_enter_the_loss_once(step):
    metrics, loss, gradient, _ = step(NO_GATE, *SEQUENCE)
    # The products of the ratios are 1 and 1.5, cut at 1.2.
    assert loss == pytest.approx(-(0.5 * (1 + 1) - 0.5 * (1.2 + 1.2)) / 4)
    assert gradient == pytest.approx([-0.5 / 4, -0.5 / 4, 0, 0.5 * 1.2 / 4, 0.5 * 1.2 / 4])
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.5)


def test_a_rejected_token_has_no_gradient_and_still_counts_in_verls_mean(step):
    metrics, loss, gradient, data = step(NO_GATE, *REJECT)
    assert [row.tolist() for row in data["response_mask"].unbind()] == [[0, 1, 0], [1, 1]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 4)
    # V1 rejects in response_mask alone; its engine divides by loss_mask, which the agent loop wrote.
    assert loss == pytest.approx(-(0.5 - 0.5 * 2) / 4)
    assert gradient == pytest.approx([0, -0.5 / 4, 0, 0.5 / 4, 0.5 / 4])


def test_weights_and_rejection_together(step):
    _, loss, gradient, _ = step(NO_GATE, *TOKEN, *REJECT)
    assert loss == pytest.approx(-(0.5 * 0.25 - 0.5 * (1.5 + 1)) / 4)
    assert gradient == pytest.approx([0, -0.5 * 0.25 / 4, 0, 0.5 * 1.5 / 4, 0.5 / 4])


@pytest.mark.parametrize("options", [(), TOKEN, SEQUENCE, REJECT], ids=["none", "token", "sequence", "reject"])
def test_our_metrics_are_of_all_tokens_whatever_is_corrected(step, options):
    metrics, *_ = step(NO_GATE, *options)
    assert metrics["qerl/rollout_kl_k3"] == pytest.approx(sum(K3) / 4)
    assert metrics["qerl/rollout_kl_k3"] == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-5)
    assert metrics["qerl/rollout_log_prob_abs_diff"] == pytest.approx((2 * math.log(4) + math.log(1.5)) / 4)


@pytest.mark.parametrize("options", [TOKEN, SEQUENCE, REJECT], ids=["token", "sequence", "reject"])
def test_correction_hides_nothing_from_the_gate(step, options):
    with pytest.raises(RuntimeError, match=r"KL\(rollout \|\| actor\)=0\.586 nats per token over 4 tokens of 2 "):
        step(*options)
