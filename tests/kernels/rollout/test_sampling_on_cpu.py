"""Drawn tokens: their frequencies, log-probs and ranks in torch, and the kernels in Triton's interpreter."""

import pytest
import torch

from verl_qerl.kernels.rollout import sampling
from verl_qerl.kernels.rollout.sampling import BLOCK, draw_tokens

LAST = 1 - 2.0**-24  # the largest that torch.rand gives


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (4 * torch.randn((rows, vocabulary), generator=generator)).to(dtype)


def expected_log_probs(logits: torch.Tensor, temperature: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    scaled = logits.double() / temperature.double()[:, None]
    return scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_tokens_come_as_often_as_they_should(temperature, monkeypatch):
    """Over an even grid of both uniform numbers, within a cell of it at each end."""
    monkeypatch.setattr(sampling, "BLOCK", 16)
    cells = 400
    logits = torch.full((1, 57), -torch.inf)
    likely = torch.tensor([3, 7, 15, 32, 56])
    logits[0, likely] = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    grid = (torch.arange(cells) + 0.5) / cells
    uniform = torch.cartesian_prod(grid, grid)
    rows = len(uniform)
    tokens, _, _ = draw_tokens(logits.expand(rows, -1), torch.full((rows,), temperature), uniform)
    found = torch.stack([(tokens == token).float().mean() for token in likely])
    assert torch.isin(tokens, likely).all()
    assert (found - (logits[0, likely] / temperature).softmax(0)).abs().max() < 2 / cells


def test_log_probs_and_ranks_are_those_of_the_whole_distribution():
    logits, temperature = random_logits(32, 3 * BLOCK - 5), torch.linspace(0.5, 2, 32)
    uniform = torch.rand((32, 2), generator=torch.Generator().manual_seed(0))
    tokens, log_probs, rank = draw_tokens(logits, temperature, uniform, with_rank=True)
    assert (log_probs - expected_log_probs(logits, temperature, tokens)).abs().max() < 1e-5
    assert torch.equal(rank, (logits >= logits.gather(1, tokens[:, None])).sum(1))
    assert len(tokens.unique()) > 16
    assert draw_tokens(logits, temperature, uniform)[2] is None


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST, 1.0])
def test_what_is_masked_is_never_drawn(uniform):
    logits = random_logits(3, 3 * BLOCK)
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[0, BLOCK + 5 : BLOCK + 9] = True  # a block between two of nothing
    allowed[1, ::7] = True
    allowed[2, -1] = True
    logits[~allowed] = -torch.inf
    tokens, log_probs, _ = draw_tokens(logits, torch.ones(3), torch.full((3, 2), uniform))
    assert allowed.gather(1, tokens[:, None]).all()
    assert log_probs[2] == 0


def test_a_row_that_is_not_a_number_has_no_log_prob():
    logits = random_logits(3, 100)
    logits[0, 50], logits[1] = torch.nan, -torch.inf
    tokens, log_probs, _ = draw_tokens(logits, torch.ones(3), torch.rand(3, 2))
    assert log_probs.isnan().tolist() == [True, True, False]
    assert ((tokens >= 0) & (tokens < 100)).all()


def in_wider_rows(logits: torch.Tensor) -> torch.Tensor:
    """A view of rows that go on, as vLLM's do where the vocabulary is padded."""
    wide = torch.full((len(logits), logits.shape[1] + 24), 100.0, dtype=logits.dtype)
    wide[:, : logits.shape[1]] = logits
    return wide[:, : logits.shape[1]]


def test_the_kernels_compute_what_torch_does(interpreted):
    cases = []
    for rows, vocabulary, padded in [(1, 100, True), (5, BLOCK, False), (4, 3 * BLOCK + 1, True)]:
        logits = random_logits(rows, vocabulary, torch.float16)
        logits[:, 4::5] = -torch.inf
        logits[-1] -= 300  # whose exponentials are 0 but for the right shift
        logits[-1, : min(BLOCK, vocabulary // 2)] = -torch.inf
        uniform = torch.rand((rows, 2), generator=torch.Generator().manual_seed(rows))
        uniform[0] = 1  # rounding may make as much of it
        temperature = torch.linspace(0.7, 1.5, 2 * rows)[::2]  # not side by side
        cases.append((in_wider_rows(logits) if padded else logits, temperature, uniform, True))
    cases.append((torch.full((2, 50), -torch.inf, dtype=torch.float16), torch.ones(2), torch.rand(2, 2), True))
    cases.append((torch.full((2, 50), torch.nan, dtype=torch.float16), torch.ones(2), torch.rand(2, 2), False))
    found = interpreted("verl_qerl.kernels.rollout.sampling", cases)
    for (logits, temperature, uniform, _), (tokens, log_probs, rank) in zip(cases[:-1], found, strict=False):
        expected, _, expected_rank = draw_tokens(logits, temperature, uniform, with_rank=True)
        assert torch.equal(tokens, expected)
        assert torch.equal(rank, expected_rank)
        if logits.isfinite().any():
            assert (log_probs - expected_log_probs(logits, temperature, tokens)).abs().max() < 1e-5
        else:
            assert log_probs.isnan().all()
    assert found[-1][1].isnan().all()
