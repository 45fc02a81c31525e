"""Two gloo ranks, each with the whole packed base and half of every parameter, compute what one process does."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
SCRIPT = Path(__file__).with_name("fsdp2_two_ranks.py")


@pytest.fixture(scope="module")
def ranks(fresh_process, tmp_path_factory):
    """What each rank found: sharded and whole."""
    out = tmp_path_factory.mktemp("fsdp2")
    fresh_process(str(SCRIPT), str(out), ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def test_the_loss_is_that_of_the_whole_model(ranks):
    assert [found["sharded"]["loss"] for found in ranks] == [found["loss"] for found in ranks]
    assert ranks[0]["loss"] != ranks[1]["loss"]


def test_lora_gradients_are_those_of_the_whole_model(ranks):
    for found in ranks:
        grads = found["sharded"]["grads"]
        assert len(grads) == 28
        assert grads.keys() == found["grads"].keys()
        assert all(torch.equal(grad, found["grads"][name]) for name, grad in grads.items())
        assert all(grad.abs().sum() > 0 for grad in grads.values())


def test_every_rank_holds_the_packed_bits(ranks):
    for found in ranks:
        assert len(found["digests"]) == 14
        assert found["sharded"]["digests"] == found["digests"]


def test_no_packed_tensor_is_a_parameter(ranks):
    # FSDP2 of torch 2.11 refuses integer parameters.
    parameters = ranks[0]["sharded"]["parameters"]
    assert {dtype for dtype, _ in parameters.values()} == {torch.float32, torch.bfloat16}
    assert not [name for name in parameters if name.endswith("base_layer.weight")]
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    assert parameters[f"{first}.lora_A.default.weight"] == (torch.float32, (4, 64))


@pytest.mark.parametrize("fused", [False, True], ids=["peft", "fused"])
def test_a_sharded_base_changes_no_bit(ranks, fused):
    for found in ranks:
        sharded, replicated = (found["parts"][f"{kind} {fused}"] for kind in ("sharded", "replicated"))
        assert sharded["loss"] == replicated["loss"]
        assert sharded["digests"] == replicated["digests"] == found["digests"]
        assert len(sharded["grads"]) == 28
        assert all(torch.equal(grad, replicated["grads"][name]) for name, grad in sharded["grads"].items())


def test_each_rank_holds_half_of_a_sharded_base(ranks):
    for found in ranks:
        sharded, replicated = (found["parts"][f"{kind} True"]["held"] for kind in ("sharded", "replicated"))
        padding = 14 * 2 * 32  # the head, and zeros to the next multiple
        assert replicated / 2 <= sharded <= replicated / 2 + padding


def test_a_sharded_base_under_checkpointing_and_twice(ranks):
    for found in ranks:
        expected = found["parts"]["sharded True"]
        first, second = found["parts"]["checkpointed"], found["parts"]["again"]
        assert first["loss"] == second["loss"] == expected["loss"]
        assert all(torch.equal(grad, expected["grads"][name]) for name, grad in first["grads"].items())
        assert all(torch.equal(grad, 2 * expected["grads"][name]) for name, grad in second["grads"].items())


def test_a_sharded_base_is_moved_and_not_saved(ranks):
    for found in ranks:
        expected, moved = found["parts"]["sharded True"], found["parts"]["moved"]
        assert moved["loss"] == expected["loss"]
        assert moved["digests"] == expected["digests"]
        assert not [key for key in moved["keys"] if "packed" in key]
