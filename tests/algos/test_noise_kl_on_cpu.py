import math

import pytest
import torch

from verl_qerl.algos.noise_kl import SIGMA_BOUNDS, noise_kl, search_sigma


def policies() -> list[torch.Tensor]:
    """Three distributions, [V] log-probs each: one that samples, one with noise, one without."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator, dtype=torch.float64)
    moved = [logits + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [one.log_softmax(0) for one in moved]


@pytest.mark.parametrize("sampler", ["noisy", "clean", "third"])
def test_whoever_sampled_the_estimate_is_the_kl_on_average(sampler):
    third, noisy, clean = policies()
    sampled = {"noisy": noisy, "clean": clean, "third": third}[sampler]
    exact = float((noisy.exp() * (noisy - clean)).sum())
    # Each token as often as its policy samples it, so that the mean is the expectation.
    counts = (sampled.exp() * 1e6).round().long()
    chosen = torch.repeat_interleave(torch.arange(len(counts)), counts)
    assert exact > 0.02
    assert noise_kl(sampled[chosen], noisy[chosen], clean[chosen]) == pytest.approx(exact, rel=1e-3)


def test_tokens_of_the_noisy_policy_give_k3():
    _, noisy, clean = (one.float() for one in policies())
    k3 = ((clean - noisy).exp() - 1 - (clean - noisy)).mean()
    assert noise_kl(noisy, noisy, clean) == pytest.approx(float(k3), rel=1e-4)


def test_no_noise_is_exactly_zero_and_no_sample_is_no_number():
    third, noisy, _ = policies()
    assert noise_kl(third, noisy, noisy) == 0.0
    assert math.isnan(noise_kl(*3 * [torch.empty(0)]))
    assert noise_kl(*(torch.tensor([value]) for value in (-1.0, -1.0, 800.0))) == math.inf


def tried(kl, target, start=1e-2):
    seen = []
    found = search_sigma(lambda sigma: seen.append(sigma) or kl(sigma), target, start)
    assert found.tries == len(seen) == len(set(seen))
    assert all(SIGMA_BOUNDS[0] <= sigma <= SIGMA_BOUNDS[1] for sigma in seen)
    assert found.sigma in seen
    assert found.kl == kl(found.sigma)
    return found


@pytest.mark.parametrize("target", [1e-4, 1e-3, 2e-2, 0.5])
@pytest.mark.parametrize(
    ("kl", "most"),
    [
        (lambda sigma: 3.0 * sigma**2, 3),
        (lambda sigma: 700.0 * sigma**2, 3),
        (lambda sigma: 5e-5 + 3.0 * sigma**2, 6),  # rounding alone makes 5e-5
        (lambda sigma: 10 * sigma**2 / (1 + 5 * sigma), 6),
        (lambda sigma: 200.0 * sigma**3, 6),
    ],
    ids=["square", "small-norms", "floor", "bent", "cube"],
)
def test_a_few_tries_find_the_sigma(kl, most, target):
    found = tried(kl, target)
    assert found.kl == pytest.approx(target, rel=0.05)
    assert found.bound is None
    assert found.tries <= most


def test_a_sigma_that_fits_is_kept():
    assert tried(lambda sigma: sigma**2, 1.02e-4).tries == 1


@pytest.mark.parametrize(
    ("kl", "target", "bound"),
    [(lambda sigma: 1e-6 * sigma, 1e-3, 1.0), (lambda sigma: 2e-3 + sigma**2, 1e-4, 1e-6), (lambda s: 0.0, 1e-3, 1.0)],
    ids=["nothing-acts", "rounding-makes-more", "zero"],
)
def test_a_target_beyond_the_bounds_names_the_bound(kl, target, bound):
    found = tried(kl, target)
    assert (found.sigma, found.bound) == (bound, bound)


@pytest.mark.parametrize("broken", [math.inf, math.nan], ids=str)
def test_what_is_no_number_is_too_much(broken):
    found = tried(lambda sigma: broken if sigma > 3e-3 else 100 * sigma**2, 1e-4)
    assert found.kl == pytest.approx(1e-4, rel=0.05)


def test_what_is_no_number_once_ends_no_search():
    once = iter([math.nan, 0.0])
    found = search_sigma(lambda sigma: next(once, 100 * sigma**2), 1e-2, 1e-4)  # tries 1e-4 twice in a row
    assert found.tries == 10


def test_a_jump_over_the_target_ends_at_the_nearest():
    found = tried(lambda sigma: 1e-2 if sigma > 2e-2 else 1e-4, 2e-3)
    assert found.kl == 1e-2
    assert found.tries == 10
