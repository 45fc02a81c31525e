"""Two ranks that share sequences compute what each computes alone: verl's Ulysses around our engine."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from qerl_testing import assert_close

from verl_qerl.verl_plugin.config.sequence_parallel import check_sharing

SCRIPT = Path(__file__).with_name("sequence_parallel_cases.py")
SHARED = ("logits", "head", "sharded", "kept", "moe", "whole")
NAMES = {
    "size": "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "attention": "actor_rollout_ref.model.override_config.attn_implementation",
    "remove_padding": "actor_rollout_ref.model.use_remove_padding",
    "num_gpus": "trainer.n_gpus_per_node",
}
GOOD = {"size": 2, "attention": "flash_attention_2", "remove_padding": True, "num_gpus": 4}


@pytest.fixture(scope="module")
def ranks(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    # Ours first: what verl replaces in transformers stays replaced for the others.
    fresh_process(str(SCRIPT), str(models), str(out), *SHARED, "padded", "unpadded", ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", SHARED)
def test_each_rank_computes_its_part_of_the_tokens(ranks, case):
    for found in ranks:
        assert found[case][1]["tokens"] == [21, 24]
        assert found[case][2]["tokens"] == [11, 12]  # one of 22 is padding


@pytest.mark.parametrize("case", SHARED)
def test_log_probs_and_entropy_are_those_of_whole_sequences(ranks, case):
    # No bit differs where a row of a product does not depend on how many rows there are. Where it does: attention in
    # another order of sums changes log-probs by 4e-4 (the next test), wrong labels at the cuts alone by 2e-2.
    for found in ranks:
        alone, shared = found[case][1], found[case][2]
        assert len(alone["log_probs"]) == 45
        for key in ("log_probs", "rounded", "entropy"):
            assert_close(shared[key].float(), alone[key].float(), 1e-3)
        assert shared["loss"] == pytest.approx(alone["loss"], rel=2e-3)
    assert torch.equal(ranks[0][case][2]["log_probs"], ranks[1][case][2]["log_probs"])


@pytest.mark.parametrize("case", ["logits", "unpadded"], ids=["reference", "sdpa"])
def test_an_attention_keeps_sequences_apart_that_have_no_padding(ranks, case):
    padded, packed = ranks[0]["padded"][1], ranks[0][case][1]
    assert padded["tokens"] == [12, 14]  # of the longest, for each of two
    assert packed["tokens"] == [21, 24]
    assert_close(packed["log_probs"], padded["log_probs"], 1e-3)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=2e-3)
    for name, grad in packed["grads"].items():
        assert_close(grad, padded["grads"][name], 0.03)


@pytest.mark.parametrize(
    ("case", "count"), [("logits", 28), ("head", 28), ("sharded", 32), ("kept", 28), ("moe", 16), ("whole", 27)]
)
def test_gradients_are_those_of_whole_sequences(ranks, case, count):
    # Each rank's sum over its tokens is a bf16 number of each micro-batch (2^-9 of it) before float32 sums over ranks:
    # 2.5e-3 to 3.3e-3 measured. A rank's share that is lost, or counts twice, changes them by more than 0.1.
    for found in ranks:
        alone, shared = found[case][1], found[case][2]
        assert shared["grads"].keys() == alone["grads"].keys()
        assert len(shared["grads"]) == count
        for name, grad in shared["grads"].items():
            assert_close(grad, alone["grads"][name], 5e-3)
        assert shared["norm"] == pytest.approx(alone["norm"], rel=1e-3)
        assert shared["norm"] > 0.1
        assert shared["checkpointing"] == (case != "kept")


def test_weights_are_rounded_for_shared_sequences_too(ranks):
    shared = ranks[0]["whole"][2]
    assert not torch.equal(shared["rounded"], shared["log_probs"])
    assert torch.equal(ranks[0]["head"][2]["rounded"], ranks[0]["head"][2]["log_probs"])  # nothing to round


@pytest.mark.parametrize("case", SHARED)
def test_ranks_that_share_sequences_hold_and_send_the_same(ranks, case):
    alone, *shared = ranks[0][case][1], ranks[0][case][2], ranks[1][case][2]
    assert len(alone["digests"]) == {"whole": 0, "moe": 23}.get(case, 14)
    for found in shared:
        assert found["digests"] == alone["digests"]
        assert found["sent"].keys() == alone["sent"].keys()
        assert len(found["sent"]) > 1
        assert all(torch.equal(found["sent"][name], tensor) for name, tensor in alone["sent"].items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": 4},
        {"attention": "flash_attention_3"},
        {"attention": "kernels-community/flash-attn2"},
        {"size": 1, "attention": "sdpa", "remove_padding": False, "num_gpus": 3},
    ],
    ids=str,
)
def test_what_verl_can_share_passes(changes):
    check_sharing({NAMES[name]: value for name, value in (GOOD | changes).items()}.get)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_gpus": 3}, r"size=2 does not divide the 3 GPUs of the run\. Accepted are divisors of it"),
        ({"size": 0}, r"size=0 does not divide the 4 GPUs"),
        ({"size": "two"}, r"size=two does not divide the 4 GPUs"),
        (
            {"remove_padding": False},
            r"^actor_rollout_ref\.model\.use_remove_padding=False .* Accepted is True\. Set",
        ),
        ({"attention": "sdpa"}, r"attn_implementation=sdpa does not go together .* Accepted is flash_attention_2"),
        ({"attention": "eager"}, r"attn_implementation=eager does not go together"),
        ({"attention": "flex_attention"}, r"attn_implementation=flex_attention does not go together"),
        (
            {"attention": "paged|flash_attention_2"},
            r"attn_implementation=paged\|flash_attention_2 does not go together",
        ),
    ],
    ids=str,
)
def test_what_verl_cannot_share_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_sharing({NAMES[name]: value for name, value in (GOOD | changes).items()}.get)


def test_the_head_gives_log_probs_and_entropy_of_the_logits(ranks):
    head, logits = ranks[0]["head"][1], ranks[0]["logits"][1]
    for key in ("log_probs", "entropy"):
        assert_close(head[key].float(), logits[key].float(), 1e-2)
