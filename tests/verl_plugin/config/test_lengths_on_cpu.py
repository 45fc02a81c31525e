"""An engine or a micro-batch without room for the longest sequence is refused before Ray starts."""

import re

import pytest

pytest.importorskip("verl")

from verl_qerl.verl_plugin.config import attention
from verl_qerl.verl_plugin.config.apply import prepare

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OURS = ("+aqn.enabled=true", "data.max_prompt_length=96", "data.max_response_length=16")
IN_TOKENS = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=")


@pytest.mark.parametrize("room", [64, 96])
def test_an_engine_needs_room_for_an_answer(validate, room):
    named = f"{ROLLOUT}.max_model_len={room}"
    with pytest.raises(
        ValueError, match=rf"^{re.escape(named)} does not go together with data\.max_prompt_length=96: "
    ):
        validate(*OURS, named)
    validate(*OURS[1:], named)
    for accepted in ("97", "null"):
        validate(*OURS, f"{ROLLOUT}.max_model_len={accepted}")


def test_a_micro_batch_needs_room_for_a_sequence(validate):
    refused = rf"^{ACTOR}\.ppo_max_token_len_per_gpu=100 does not .*use_dynamic_bsz=True and sequences of 112 tokens: "
    with pytest.raises(ValueError, match=refused):
        validate(*OURS, IN_TOKENS[0], f"{IN_TOKENS[1]}100")
    validate(*OURS[1:], IN_TOKENS[0], f"{IN_TOKENS[1]}100")
    validate(*OURS, f"{IN_TOKENS[1]}100")
    validate(*OURS, IN_TOKENS[0], f"{IN_TOKENS[1]}112")
    validate(*OURS, IN_TOKENS[0], f"{IN_TOKENS[1]}100", f"{ROLLOUT}.max_model_len=100")


def test_gpus_that_share_a_sequence_count_together(validate, monkeypatch):
    monkeypatch.setattr(attention, "has_flash_attn", lambda: True)
    shared = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.use_remove_padding=True")
    shared += ("++actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",)
    shared += (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",)
    validate(*OURS, *shared, IN_TOKENS[0], f"{IN_TOKENS[1]}56")
    with pytest.raises(ValueError, match=r"ppo_max_token_len_per_gpu=55 does not go together"):
        validate(*OURS, *shared, IN_TOKENS[0], f"{IN_TOKENS[1]}55")


def test_log_probs_of_the_rollout_too(validate):
    named = f"{ROLLOUT}.log_prob_max_token_len_per_gpu=100"
    with pytest.raises(ValueError, match=rf"^{re.escape(named)} does not go together with {ROLLOUT}\.log_prob_use_dyn"):
        validate(*OURS, IN_TOKENS[0], named)


@pytest.mark.parametrize("in_tokens", [True, False])
def test_both_passes_of_the_actor_count_alike(validate, in_tokens):
    """As verl's workers assert, without a word, once the models are about to be loaded."""
    of_update, of_log_probs = f"{ACTOR}.use_dynamic_bsz={in_tokens}", f"{ROLLOUT}.log_prob_use_dynamic_bsz="
    refused = rf"^{re.escape(of_log_probs)}{not in_tokens} does not go .*{re.escape(of_update)}: .* is {in_tokens}\."
    with pytest.raises(ValueError, match=refused):
        validate(*OURS, of_update, f"{of_log_probs}{not in_tokens}")
    validate(*OURS[1:], of_update, f"{of_log_probs}{not in_tokens}")
    validate(*OURS, of_update)
    validate(*OURS, of_update, f"{of_log_probs}{in_tokens}")


@pytest.mark.parametrize(("size", "ranks", "divides"), [(3, 1, False), (4, 1, True), (4, 4, False), (2, 4, True)])
def test_a_micro_batch_divides_a_mini_batch(validate, size, ranks, divides):
    """As verl's workers assert; each rank has its part of the 4 x 2 answers."""
    sizes = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=2")
    sizes += (f"trainer.n_gpus_per_node={ranks}", f"{ACTOR}.ppo_micro_batch_size_per_gpu={size}")
    sizes += (f"{ROLLOUT}.tensor_model_parallel_size=1",)
    if divides:
        validate(*OURS, *sizes)
    else:
        refused = rf"^{ACTOR}\.ppo_micro_batch_size_per_gpu={size} on {ranks} data-parallel ranks .* the 8 answers of a"
        with pytest.raises(ValueError, match=refused):
            validate(*OURS, *sizes)
        validate(*OURS, *sizes, f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=112")
        validate(*OURS[1:], *sizes)


@pytest.mark.parametrize("node", [ACTOR, "critic"])
def test_ranks_share_a_mini_batch_alike(configuration, node):
    """As verl's workers assert at the first update, also of micro-batches that are counted in tokens."""
    sizes = ("data.train_batch_size=12", f"{ROLLOUT}.n=2", "trainer.n_gpus_per_node=4", *IN_TOKENS[:1])
    sizes += (f"{ACTOR}.ppo_mini_batch_size=6", "algorithm.adv_estimator=gae", f"{ROLLOUT}.name=vllm")
    prepare(configuration(*OURS, *sizes))
    config = configuration(*OURS, *sizes, f"{node}.ppo_mini_batch_size=3")
    said = (
        rf"^{node}\.ppo_mini_batch_size=3 times {ROLLOUT}\.n=2 are 6 answers, which 4 data-parallel ranks cannot share"
    )
    with pytest.raises(ValueError, match=said):
        prepare(config)
    prepare(configuration(*sizes, f"{node}.ppo_mini_batch_size=3"))
