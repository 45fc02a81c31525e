"""Rows of logits by float64, and the kernels in Triton's interpreter against torch."""

import pytest
import torch
from qerl_testing import assert_close

from verl_qerl.kernels.actor.logit_rows import BLOCK, gradient_of_rows, score_rows

MODULE = "verl_qerl.kernels.actor.logit_rows"


def rows(count: int, vocabulary: int, dtype: torch.dtype, padded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, their rows cut from wider ones if `padded`, and labels: the first, the last and others."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn((count, vocabulary + 24 * padded), generator=generator)).to(dtype)
    logits[:, vocabulary:] = 100.0
    labels = torch.randint(vocabulary, (count,), generator=generator)
    labels[0], labels[-1] = 0, vocabulary - 1
    return logits[:, :vocabulary], labels


def by_float64(logits, labels, temperature):
    """(log-probs, entropies), and logits of which they have gradients."""
    exact = logits.double().detach().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), exact


def check_scores(found, logits, labels, temperature, entropy):
    """Within 4e-6 of float64: values up to 40 have steps of 4e-6 in float32, entropies are below 10."""
    log_probs, entropies, _ = by_float64(logits, labels, temperature)
    assert [part.dtype for part in found] == [torch.float32] * 3
    assert (found[0].double() - log_probs).abs().max() < 4e-6
    assert (found[1].double() - (logits.double() / temperature).logsumexp(-1)).abs().max() < 4e-6
    expected = entropies if entropy else torch.zeros_like(entropies)
    assert (found[2].double() - expected).abs().max() < 4e-6


def gradients(logits, labels, temperature, entropy):
    """Arguments of `gradient_of_rows`, and what it should give."""
    grad, of_entropy = torch.linspace(-1, 1, len(labels)), torch.linspace(2, -1, len(labels))
    _, log_sums, entropies = score_rows(logits, labels, temperature, True)
    log_probs, exact_entropies, exact = by_float64(logits, labels, temperature)
    total = (log_probs * grad).sum() + (exact_entropies * of_entropy * entropy).sum()
    total.backward()
    grads = (grad, of_entropy if entropy else None)
    return (logits, labels, temperature, (log_sums, entropies), grads), exact.grad


BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}  # halves are rounded once


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_in_torch(dtype, temperature, entropy):
    logits, labels = rows(7, 500, dtype)
    check_scores(score_rows(logits, labels, temperature, entropy), logits, labels, temperature, entropy)
    arguments, expected = gradients(logits, labels, temperature, entropy)
    found = gradient_of_rows(*arguments)
    assert found.dtype == dtype
    assert_close(found, expected, BOUNDS[dtype])


# One column, less than a block, blocks that end with the row, and a last one of one column.
SHAPES = [(1, 1, False), (3, 100, True), (5, BLOCK, False), (4, 3 * BLOCK + 1, True)]
# The interpreter cuts where it converts to bfloat16: gradients in it are tested on a GPU.
CASES = [(*shape, torch.bfloat16, 1.0, True) for shape in SHAPES]
CASES += [(4, 3 * BLOCK + 1, True, torch.float16, 0.7, entropy) for entropy in (False, True)]


@pytest.fixture(scope="module")
def scored(interpreted):
    inputs = [(*rows(count, size, dtype, pad), t, entropy) for count, size, pad, dtype, t, entropy in CASES]
    inputs.append(growing())
    return list(zip(inputs, interpreted(MODULE, inputs), strict=True))


def growing():
    """Each block has larger logits than all before it, and the last one the smallest."""
    logits = (torch.arange(4 * BLOCK) // BLOCK * 30.0 + torch.linspace(0, 3, 4 * BLOCK))[None]
    logits[:, -BLOCK:] = -80.0
    return logits, torch.tensor([2 * BLOCK + 5]), 1.0, True


@pytest.mark.parametrize("i", range(len(CASES) + 1))
def test_the_kernel_scores_rows(scored, i):
    arguments, found = scored[i]
    check_scores(found, *arguments)


def test_logits_that_are_no_numbers_are_not_hidden(interpreted):
    logits, labels = rows(3, BLOCK + 9, torch.float32)
    logits[0, 4], logits[1, BLOCK + 8] = torch.nan, torch.inf
    (found,) = interpreted(MODULE, [(logits, labels, 1.0, True)])
    for part in found:
        assert part.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_kernel_gives_the_gradient(interpreted, dtype):
    cases = [
        gradients(*rows(count, size, dtype, pad), temperature, entropy)
        for count, size, pad in SHAPES
        for temperature, entropy in ((1.0, False), (0.7, True))
    ]
    found = interpreted(MODULE, [arguments for arguments, _ in cases], "launch_gradient")
    for out, (_, expected) in zip(found, cases, strict=True):
        assert out.dtype == dtype
        assert_close(out, expected, BOUNDS[dtype])


def test_no_rows():
    logits, labels = torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64)
    assert [len(part) for part in score_rows(logits, labels, 1.0, True)] == [0, 0, 0]
