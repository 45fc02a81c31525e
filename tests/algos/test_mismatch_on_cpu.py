"""The distance of rollout and actor against values by hand, and what must have no influence."""

import math

import pytest
import torch

from verl_qerl.algos.mismatch import rollout_mismatch, undefined_log_probs

NAN, INF = math.nan, math.inf


def compare(rollout, actor, mask=None):
    rollout, actor = torch.tensor([rollout]), torch.tensor([actor])
    return rollout_mismatch(rollout, actor, torch.ones_like(rollout) if mask is None else torch.tensor([mask]))


def test_by_hand():
    # Probabilities of the rollout 1/2, 1/4, 1/4; of the actor 1/4, 1/4, 1/2: pi_actor / pi_rollout = 1/2, 1, 2.
    found = compare([math.log(0.5), math.log(0.25), math.log(0.25)], [math.log(0.25), math.log(0.25), math.log(0.5)])
    # 1/2 - 1 + ln 2, 0, 2 - 1 - ln 2
    assert found.kl_k3 == pytest.approx(0.5 / 3, rel=1e-6)
    assert found.log_prob_abs_diff == pytest.approx(2 * math.log(2) / 3, rel=1e-6)
    assert found.num_tokens == 3


def test_one_token_tells_the_direction():
    # KL(actor || rollout) would swap the two.
    assert compare([0.0], [-1.0]).kl_k3 == pytest.approx(math.exp(-1), rel=1e-9)
    assert compare([-1.0], [0.0]).kl_k3 == pytest.approx(math.e - 2, rel=1e-9)


def test_is_the_exact_kl_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    rollout, actor = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (rollout.exp() * (rollout - actor)).sum().item()
    drawn = torch.multinomial(rollout.exp(), 200_000, replacement=True, generator=generator)[None]
    found = rollout_mismatch(rollout[drawn], actor[drawn], torch.ones_like(drawn))
    assert exact > 0.1
    assert found.kl_k3 == pytest.approx(exact, rel=0.02)


def test_small_differences_do_not_cancel():
    # d^2 / 2; exp(d) - 1 - d in float32 is 0 or 1e-7 here.
    assert compare([-2.0], [-2.0 + 2**-14]).kl_k3 == pytest.approx(2**-29, rel=1e-3)


def test_equal_policies_give_zero():
    assert compare([-1.5, -0.1], [-1.5, -0.1]) == (0.0, 0.0, 2)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30], ids=str)
@pytest.mark.parametrize("where", ["rollout", "actor", "both"])
def test_masked_tokens_have_no_influence(bad, where):
    rollout = [-1.0, bad if where != "actor" else 0.0, -1.0, bad]
    actor = [-1.0, bad if where != "rollout" else 0.0, -2.0, bad]
    expected = compare([-1.0, -1.0], [-1.0, -2.0])
    assert compare(rollout, actor, [1, 0, 1, 0]) == expected
    assert compare(rollout, actor, [1.0, 0.0, 1.0, 0.0]) == expected  # masks of either type


@pytest.mark.parametrize(("rollout", "actor"), [(NAN, -1.0), (-1.0, NAN), (-INF, -1.0), (-1.0, -INF), (-INF, -INF)])
def test_a_token_that_counts_is_not_hidden(rollout, actor):
    found = compare([-1.0, rollout], [-1.0, actor])
    assert not math.isfinite(found.kl_k3)


def test_tokens_count_alike_whatever_their_sequence():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    actor = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]])
    found = rollout_mismatch(torch.full((2, 3), -1.0), actor, mask)
    assert found == (pytest.approx(math.exp(-1) / 4), 0.25, 4)


def test_where_log_probs_are_no_numbers():
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    log_probs = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -INF, NAN], [-1.0, NAN, NAN]])
    assert undefined_log_probs(log_probs, mask) == (2, 1, 1)
    log_probs[0, 2] = NAN
    assert undefined_log_probs(log_probs, mask) == (3, 2, 1)
    assert undefined_log_probs(log_probs, mask * torch.tensor([1, 0, 0])) is None


def test_nothing_that_counts_has_no_mean():
    found = compare([-1.0], [-2.0], [0])
    assert math.isnan(found.kl_k3)
    assert math.isnan(found.log_prob_abs_diff)
    assert found.num_tokens == 0


def test_bfloat16_is_taken_as_it_is():
    rollout, actor = torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.0078125]]).bfloat16()
    assert rollout_mismatch(rollout, actor, torch.ones(1, 1)).log_prob_abs_diff == 0.0078125


@pytest.mark.parametrize("name", ["rollout", "actor"])
def test_shapes_that_would_broadcast_are_refused(name):
    tensors = {"rollout": torch.zeros(2, 3), "actor": torch.zeros(2, 3)} | {name: torch.zeros(2, 1)}
    message = rf"^log-probs of the {name} and the mask differ: shape=\(2, 1\)\. Accepted is \(2, 3\)\."
    with pytest.raises(ValueError, match=message):
        rollout_mismatch(**tensors, mask=torch.ones(2, 3))
