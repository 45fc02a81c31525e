"""The sampling kernels on a GPU: the vocabulary of a model, bf16, and the same bits each time."""

import pytest
import torch

from verl_qerl.kernels.rollout.sampling import draw_tokens

pytestmark = pytest.mark.gpu

VOCABULARY = 152064


def random_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits in rows that go on behind the vocabulary, temperatures, uniform numbers."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = 4 * torch.randn((rows, VOCABULARY + 64), generator=generator, device="cuda")
    logits[:, ::11] = -torch.inf
    temperature = torch.linspace(0.6, 1.4, rows, device="cuda")
    uniform = torch.rand((rows, 2), generator=generator, device="cuda")
    return logits.bfloat16()[:, :VOCABULARY], temperature, uniform


@pytest.mark.parametrize("rows", [1, 8, 256, 700])
def test_log_probs_and_ranks_are_those_of_the_drawn_tokens(rows):
    logits, temperature, uniform = random_batch(rows)
    tokens, log_probs, rank = draw_tokens(logits, temperature, uniform, with_rank=True)
    scaled = logits.double() / temperature.double()[:, None]
    expected = scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    assert expected.isfinite().all()
    assert (log_probs - expected).abs().max() < 1e-4
    assert torch.equal(rank, (logits >= logits.gather(1, tokens[:, None])).sum(1))


def test_tokens_are_those_of_the_reference():
    """Up to numbers at the border between two tokens, whose running sums are added up in another order."""
    logits, temperature, uniform = random_batch(512)
    tokens, *_ = draw_tokens(logits, temperature, uniform)
    expected, *_ = draw_tokens(logits.cpu(), temperature.cpu(), uniform.cpu())
    assert (tokens.cpu() == expected).float().mean() > 0.99


def test_the_same_numbers_draw_the_same():
    batch = random_batch(256)
    first = draw_tokens(*batch, with_rank=True)
    for _ in range(20):
        again = draw_tokens(*batch, with_rank=True)
        assert all(torch.equal(*pair) for pair in zip(again, first, strict=True))


def test_frequencies_are_those_of_the_distribution():
    """Of 2^17 draws from five tokens in as many blocks: four standard deviations of each count."""
    draws, likely = 1 << 17, torch.tensor([0, 5000, 60000, 100000, VOCABULARY - 1], device="cuda")
    row = torch.full((VOCABULARY,), -torch.inf, device="cuda")
    row[likely] = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5], device="cuda")
    uniform = torch.rand((draws, 2), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    tokens, *_ = draw_tokens(row.expand(draws, -1), torch.ones(draws, device="cuda"), uniform)
    found = (tokens[:, None] == likely).float().mean(0)
    expected = row[likely].softmax(0)
    assert torch.isin(tokens, likely).all()
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / draws).sqrt()).all()
