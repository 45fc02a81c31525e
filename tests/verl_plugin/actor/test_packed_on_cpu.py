"""Passes of the actor without padding, through verl's engine: what they give is what padded ones do."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from qerl_testing import assert_close

SCRIPT = Path(__file__).with_name("packed_cases.py")
SETTINGS = ("logits", "head", "kept", "sharded", "whole", "float32")
OF_TWO_RANKS = ("logits", "sharded", "float32")
LENGTHS = torch.tensor([2, 45, 14, 36])


@pytest.fixture(scope="module")
def alone(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    padded = [f"{name} padded" for name in SETTINGS if name != "sharded"]
    packed = [name for name in SETTINGS if name != "sharded"]
    others = ("by tokens", "over padding", "broken", "refused")
    fresh_process(str(SCRIPT), str(models), str(out), *padded, *packed, *others)
    return torch.load(out / "0.pt")


@pytest.fixture(scope="module")
def ranks(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    padded = [f"{name} padded" for name in OF_TWO_RANKS]
    fresh_process(str(SCRIPT), str(models), str(out), *padded, *OF_TWO_RANKS, ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def log_probs(found):
    """Of the tokens that have a next one in their sequence."""
    last = torch.zeros(len(found["log_probs"]), dtype=torch.bool)
    last[LENGTHS.cumsum(0) - 1] = True
    return found["log_probs"][~last]


def check(packed, padded, precise=False):
    """Both compute the same but for the order of sums.

    In bf16 an output of attention that lies between two numbers may become either: 2**-8 of it. What comes of that in
    two layers is 1.1e-4 to 6e-4 of the log-probs and 6e-3 to 8e-3 of gradients; a border that is lost changes these by
    0.04 and 0.7. In float32 it is 2e-8 and 3e-7.
    """
    values, grads = (1e-6, 1e-5) if precise else (1e-3, 0.02)
    assert len(packed["log_probs"]) == len(padded["log_probs"]) == LENGTHS.sum()
    assert packed["entropy"].dtype == padded["entropy"].dtype == torch.float32
    assert_close(log_probs(packed), log_probs(padded), values)
    assert_close(packed["entropy"], padded["entropy"], values)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=grads / 4)
    assert packed["norm"] == pytest.approx(padded["norm"], rel=grads / 4)
    assert packed["grads"].keys() == padded["grads"].keys()
    for name, grad in packed["grads"].items():
        assert_close(grad, padded["grads"][name], grads)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "sharded"])
def test_packed_passes_give_what_padded_ones_give(alone, name):
    packed, padded = alone[name], alone[f"{name} padded"]
    assert (packed["tokens"], padded["tokens"]) == ([47, 50], [45, 36])  # all of two sequences; the longest, of two
    check(packed, padded, precise=name == "float32")


@pytest.mark.parametrize("name", OF_TWO_RANKS)
def test_so_they_do_on_two_ranks(ranks, name):
    for found in ranks:
        check(found[name], found[f"{name} padded"], precise=name == "float32")
    assert torch.equal(ranks[0][name]["log_probs"], ranks[1][name]["log_probs"])


def test_micro_batches_may_be_counted_in_tokens(alone):
    assert alone["by tokens"]["tokens"] == [16, 45]  # of three
    check(alone["by tokens"], alone["logits padded"])


def test_the_same_attention_leaves_padding_out(alone):
    assert alone["over padding"]["tokens"] == [45, 36]
    check(alone["over padding"], alone["logits padded"])


def test_a_border_that_is_lost_is_seen(alone):
    with pytest.raises(AssertionError, match="RMS error ratio"):
        check(alone["broken"], alone["logits padded"])


def test_a_model_with_an_attention_of_its_own_is_refused(alone):
    for said in alone["refused"]:
        assert said.startswith("Qwen2ForCausalLM has no attention that can be exchanged: model.override_config.attn")
