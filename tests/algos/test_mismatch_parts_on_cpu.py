"""The arithmetic of the parts; tests/verl_plugin/trainer/test_mismatch_parts_on_cpu.py feeds it as verl does."""

import math

import pytest
import torch

from verl_qerl.algos.mismatch_parts import PARTS, Scores, mismatch_parts

SIZE = (4, 6)
FRESH = torch.zeros(4, dtype=torch.bool)
ALL = torch.ones(SIZE)


def tensors(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


def test_by_hand():
    # Two tokens of one sequence: d = (0.3, -0.1), the noise moved them by (0.2, 0.1), the kernels by (0.1, -0.2).
    row = [torch.tensor([values]) for values in ((-1.0, -2.0), (-1.1, -1.8), (-1.3, -1.9))]
    actor, clean, sampled = (tensor.double() for tensor in row)
    found = mismatch_parts(Scores(actor, clean, sampled, noisy=sampled), torch.ones(1, 2), torch.zeros(1).bool())
    assert found.keys() == {"kernel", "noise"}
    assert found["noise"].abs_diff == pytest.approx(0.15)
    assert found["kernel"].abs_diff == pytest.approx(0.15)
    assert found["noise"].share == pytest.approx((0.2 * 0.3 - 0.1 * 0.1) / 0.1)
    assert found["kernel"].share == pytest.approx((0.1 * 0.3 + 0.2 * 0.1) / 0.1)


@pytest.mark.parametrize("stale", [FRESH, ~FRESH, torch.tensor([0, 1, 0, 1]).bool()], ids=["fresh", "stale", "mixed"])
def test_shares_add_up_to_one(stale):
    actor, clean, sampled, quantized, noisy = tensors(5)
    for scores in (Scores(actor, clean, sampled), Scores(actor, clean, sampled, quantized, noisy)):
        found = mismatch_parts(scores, ALL, stale)
        assert sum(part.share for part in found.values()) == pytest.approx(1)
        assert ("staleness" in found) == bool(stale.any())


@pytest.mark.parametrize("broken", PARTS)
def test_a_known_difference_shows_in_its_part_alone(broken):
    (actor,) = tensors(1)
    move = 0.1 * tensors(2)[1]
    quantized = actor + move if broken == "quantization" else actor
    clean = quantized + move if broken == "kernel" else quantized
    noisy = clean + move if broken == "noise" else clean
    sampled = noisy + move if broken == "staleness" else noisy
    found = mismatch_parts(Scores(actor, clean, sampled, quantized, noisy), ALL, ~FRESH)
    assert found.keys() == set(PARTS)
    for name, part in found.items():
        expected = (move.abs().mean().item(), 1.0) if name == broken else (0.0, 0.0)
        assert part == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_last_link_is_kernel_where_the_weights_are_those_that_sampled():
    actor, sampled = tensors(2)
    scores = Scores(actor, actor, sampled)
    assert mismatch_parts(scores, ALL, FRESH).keys() == {"kernel"}
    whole = (actor - sampled).abs()
    mixed = mismatch_parts(scores, ALL, torch.tensor([0, 1, 0, 0]).bool())
    assert mixed["staleness"].abs_diff == pytest.approx(whole[1].sum().item() / 24, rel=1e-6)
    assert mixed["kernel"].abs_diff == pytest.approx((whole.sum() - whole[1].sum()).item() / 24, rel=1e-6)


def test_what_does_not_count_has_no_influence():
    actor, clean, sampled = tensors(3)
    mask = ALL.clone()
    mask[:, 4:] = 0
    expected = mismatch_parts(Scores(*(t[:, :4] for t in (actor, clean, sampled))), mask[:, :4], FRESH)
    for tensor in (actor, clean, sampled):
        tensor[:, 4:] = math.nan
    assert mismatch_parts(Scores(actor, clean, sampled), mask, FRESH) == expected
    assert mismatch_parts(Scores(actor, clean, sampled), 0 * mask, FRESH) == {}


def test_other_shapes_are_refused():
    actor, clean, sampled = tensors(3)
    with pytest.raises(ValueError, match=r"^scores\.clean and the mask differ: shape=\(4, 5\)\. Accepted is \(4, 6\)"):
        mismatch_parts(Scores(actor, clean[:, 1:], sampled), ALL, FRESH)
