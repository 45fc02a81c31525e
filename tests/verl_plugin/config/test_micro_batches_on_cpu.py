"""Micro-batches that are named for all GPUs together, as in older examples of verl."""

import pytest

pytest.importorskip("verl")

from qerl_testing import run_config

from verl_qerl.verl_plugin.config.apply import prepare

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def composed(*overrides):
    return run_config("actor_rollout_ref.model.lora_rank=32", "+rollout=nvfp4", *overrides)


@pytest.mark.parametrize("in_tokens", [True, False])
def test_each_gpu_gets_its_part(in_tokens):
    size = f"{ROLLOUT}.log_prob_micro_batch_size"
    config = composed(f"{ACTOR}.use_dynamic_bsz={in_tokens}", f"{size}=16", f"{size}_per_gpu=null")
    prepare(config)
    found = config.actor_rollout_ref.rollout
    assert (found.log_prob_micro_batch_size, found.log_prob_micro_batch_size_per_gpu) == (None, 2)


def test_so_it_does_with_a_critic_whose_own_size_follows_that_of_all():
    size, options = "critic.ppo_micro_batch_size", ("algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=False")
    config = composed(*options, f"{size}=16")
    prepare(config)
    assert (config.critic.ppo_micro_batch_size, config.critic.ppo_micro_batch_size_per_gpu) == (None, 2)
    both = composed(*options, f"{size}=16", f"{size}_per_gpu=4")
    prepare(both)  # verl refuses it
    assert (both.critic.ppo_micro_batch_size, both.critic.ppo_micro_batch_size_per_gpu) == (16, 4)


@pytest.mark.parametrize("size", ["8x", "0", "[8]"])
def test_it_is_a_number(size):
    with pytest.raises(
        ValueError, match=r"^actor.*\.ppo_micro_batch_size=.* is no number of answers\. Accepted is 1 or"
    ):
        prepare(composed(f"{ACTOR}.ppo_micro_batch_size={size}", f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"))
