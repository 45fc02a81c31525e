"""ACR against values by hand, the equation as it is printed, and what must have no influence."""

import math

import pytest
import torch

from verl_qerl.algos.acr import ACRConfig, ClipRange, LogProbs, acr_loss

CLIP = ClipRange(low=0.2, high=0.3, dual=3.0)
C = 2.0

# (R, pi_prox / pi_behav, A) -> (loss, its derivative in log pi_theta); bounds are 0.8 and 1.3, or 1.3 * ratio / 2.
BY_HAND = {
    "inside": ((1.1, 1.0, 1.0), (-1.1, -1.1)),
    "clipped above": ((1.5, 1.0, 1.0), (-1.3, 0.0)),
    "half weight, clipped above": ((1.5, 0.5, 1.0), (-0.65, 0.0)),
    "ratio 2 is not truncated": ((1.5, 2.0, 1.0), (-2.6, 0.0)),
    "widened to 2.6": ((1.5, 4.0, 1.0), (-3.0, -3.0)),  # PPO and TIS would clip at 1.3
    "clipped at 2.6": ((3.0, 4.0, 1.0), (-5.2, 0.0)),
    "no lower bound for A > 0": ((0.5, 4.0, 1.0), (-1.0, -1.0)),
    "inside, A < 0": ((0.9, 1.0, -1.0), (0.9, 0.9)),
    "clipped below": ((0.5, 1.0, -1.0), (0.8, 0.0)),
    "the lower bound stays": ((0.5, 4.0, -1.0), (1.6, 0.0)),
    "no upper bound for A < 0": ((1.5, 4.0, -1.0), (3.0, 3.0)),
    "dual clip": ((5.0, 1.0, -1.0), (3.0, 0.0)),
    "dual clip, weighed": ((5.0, 4.0, -2.0), (12.0, 0.0)),
    "no advantage": ((1.5, 4.0, 0.0), (0.0, 0.0)),
}


def log_probs_of(ratio, behav_ratio, prox=-1.5, dtype=torch.float32):
    """Log-probs [1, tokens] of theta (a leaf), prox and behav with these ratios."""
    ratio, behav_ratio = torch.tensor(ratio, dtype=torch.float64), torch.tensor(behav_ratio, dtype=torch.float64)
    prox = torch.full((1, len(ratio)), prox, dtype=torch.float64)
    theta, behav = prox + ratio.log(), prox - behav_ratio.log()
    return LogProbs(theta.to(dtype).requires_grad_(), prox.to(dtype), behav.to(dtype))


def ones(tensor):
    return torch.ones_like(tensor, dtype=torch.bool)


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    (ratio, behav_ratio, advantage), (loss, slope) = BY_HAND[name]
    log_probs = log_probs_of([ratio], [behav_ratio])
    found, _ = acr_loss(log_probs, torch.tensor([[advantage]]), torch.ones(1, 1), CLIP, C)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert log_probs.theta.grad.item() == pytest.approx(slope, abs=1e-6)


def test_metrics_by_hand():
    ratio, behav_ratio = [1.1, 1.5, 1.5, 3.0, 0.5, 5.0, 1.5, 1.1], [1.0, 1.0, 4.0, 4.0, 0.5, 1.0, 4.0, 1.0]
    advantages = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, 9.0, 9.0]])
    log_probs = log_probs_of([*ratio, 1.5, 1.0], [*behav_ratio, 4.0, 9.0])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0, 0]])
    _, metrics = acr_loss(log_probs, advantages, mask, CLIP, C)
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": 3 / 8,  # second, fourth, fifth
            "actor/pg_clipfrac_lower": 1 / 8,  # sixth
            "actor/ppo_kl": -sum(math.log(value) for value in ratio) / 8,
            "actor/acr_ratio": (1 + 1 + 2 + 2 + 0.5 + 1 + 2 + 1) / 8,
            "actor/acr_widened_frac": 3 / 8,  # third, fourth, seventh
            "actor/acr_upper_bound": (5 * 1.3 + 3 * 2.6) / 8,
            "actor/acr_freed_frac": 1 / 8,  # third; the seventh has A < 0, which no upper bound clips
        },
        abs=1e-6,
    )


def test_is_the_equation():
    generator = torch.Generator().manual_seed(0)
    theta, prox, behav, advantages = (torch.randn(8, 500, generator=generator, dtype=torch.float64) for _ in range(4))
    R, behind = (theta - prox).exp(), (prox - behav).exp()
    r = torch.minimum(torch.ones_like(R), C / behind)
    assert 0.1 < (r < 1).double().mean() < 0.9
    clipped = torch.maximum(torch.minimum(R, 1.3 / r), torch.full_like(R, 0.8))
    expected = -behind.clamp(max=C) * torch.minimum(R * advantages, clipped * advantages)
    clip = ClipRange(0.2, 0.3, dual=1e9)  # the equation has no dual clip
    found, _ = acr_loss(LogProbs(theta, prox, behav), advantages, ones(theta), clip, C)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def random_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    theta, prox, behav, advantages = (torch.randn(4, 30, generator=generator).to(dtype) for _ in range(4))
    mask = torch.rand(4, 30, generator=generator) < 0.7
    return [theta, prox, behav, advantages], mask


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30], ids=str)
@pytest.mark.parametrize("which", range(4), ids=["theta", "prox", "behav", "advantages"])
def test_masked_tokens_have_no_influence(which, bad):
    results = []
    for value in (0.0, bad):
        inputs, mask = random_inputs()
        inputs[which] = torch.where(mask, inputs[which], value)
        theta = inputs[0].requires_grad_()
        loss, metrics = acr_loss(LogProbs(theta, *inputs[1:3]), inputs[3], mask, CLIP, C)
        loss.sum().backward()
        results.append((loss.detach(), theta.grad, metrics))
    (loss, gradient, metrics), (other_loss, other_gradient, other_metrics) = results
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics
    assert not loss[~mask].any()
    assert not gradient[~mask].any()


def test_only_theta_gets_a_gradient():
    inputs, mask = random_inputs()
    for tensor in inputs:
        tensor.requires_grad_()
    loss, _ = acr_loss(LogProbs(*inputs[:3]), inputs[3].detach(), mask, CLIP, C)
    loss.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is None
    assert inputs[2].grad is None


def test_far_policies_stay_finite():
    log_probs = LogProbs(*(torch.tensor([row]) for row in ([0.0, -900.0, 0.0], [-900.0, 0.0, 0.0], [0.0, 0.0, -900.0])))
    log_probs.theta.requires_grad_()
    for advantage in (1.0, -1.0):
        loss, metrics = acr_loss(log_probs, torch.full((1, 3), advantage), torch.ones(1, 3), CLIP, C)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert all(math.isfinite(value) for value in metrics.values())
    assert log_probs.theta.grad.isfinite().all()


def test_an_impossible_token_of_the_rollout_gets_weight_c():
    log_probs = LogProbs(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.tensor([[-math.inf]]))
    loss, metrics = acr_loss(log_probs, torch.ones(1, 1), torch.ones(1, 1), CLIP, C)
    assert (loss.item(), metrics["actor/acr_ratio"]) == (-C, C)


def test_bfloat16_is_computed_in_float32():
    inputs, mask = random_inputs(torch.bfloat16)
    found, _ = acr_loss(LogProbs(*inputs[:3]), inputs[3], mask, CLIP, C)
    expected, _ = acr_loss(LogProbs(*(x.float() for x in inputs[:3])), inputs[3].float(), mask, CLIP, C)
    assert torch.equal(found, expected)


def test_where_no_token_counts_the_loss_is_zero_and_the_policies_agree():
    inputs, mask = random_inputs()
    loss, metrics = acr_loss(LogProbs(*inputs[:3]), inputs[3], torch.zeros_like(mask), CLIP, C)
    assert not loss.any()
    assert (metrics.pop("actor/acr_ratio"), metrics.pop("actor/acr_upper_bound")) == (1.0, pytest.approx(1.3))
    assert set(metrics.values()) == {0.0}


def test_shapes_that_would_broadcast_are_refused():
    inputs, mask = random_inputs()
    with pytest.raises(ValueError, match=r"^behav and the mask differ: shape=\(4, 1\)\. Accepted is \(4, 30\)\."):
        acr_loss(LogProbs(*inputs[:2], inputs[2][:, :1]), inputs[3], mask, CLIP, C)


@pytest.mark.parametrize("value", [0.99, 0, -1, "2", True, None, float("nan"), [2]], ids=str)
def test_c_below_one_is_refused(value):
    with pytest.raises(ValueError, match=r"^acr\.max_ratio=.* is no value .*\. Accepted: a number of at least 1"):
        ACRConfig(max_ratio=value)


def test_options():
    assert ACRConfig.from_mapping(None) == ACRConfig() == ACRConfig(2.0)
    assert ACRConfig.from_mapping({"max_ratio": 8}) == ACRConfig(8)
    assert ACRConfig(math.inf).max_ratio == math.inf  # never truncated
