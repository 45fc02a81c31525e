import pytest
import torch
from qerl_testing import assert_close

from verl_qerl.kernels.actor import log_probs
from verl_qerl.kernels.actor.log_probs import log_probs_of_labels


def inputs(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(tokens, 97, generator=generator) * 3).to(dtype)
    return logits, torch.randint(97, (tokens,), generator=generator)


def test_by_hand():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    found = log_probs_of_labels(logits, torch.tensor([2, 1]))
    # ln(1/4), and -100 against a logit that takes all of the probability
    torch.testing.assert_close(found, torch.tensor([-1.3862944, -100.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_are_those_of_a_float64_log_softmax_of_the_same_logits(dtype):
    logits, labels = inputs(50, dtype)
    expected = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    found = log_probs_of_labels(logits, labels)
    assert found.dtype == torch.float32
    # float32 sums of 97 terms; bf16 arithmetic, as upstream has it, is off by 1e-2
    assert (found.double() - expected).abs().max() < 2e-6


def test_gradients_are_those_of_log_softmax_rounded_once():
    logits, labels = inputs(50, torch.bfloat16)
    weights = torch.linspace(-1, 1, 50)
    a, b = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (log_probs_of_labels(a, labels) * weights).sum().backward()
    (b.log_softmax(-1).gather(-1, labels[:, None])[:, 0] * weights).sum().backward()
    assert a.grad.dtype == torch.bfloat16
    assert_close(a.grad, b.grad, 2**-8)  # one rounding to bf16 is at most 2**-9 of an element


def test_chunks_change_nothing(monkeypatch):
    logits, labels = inputs(50, torch.bfloat16)
    whole = log_probs_of_labels(logits, labels)
    monkeypatch.setattr(log_probs, "_CHUNK_TOKENS", 7)
    x = logits.clone().requires_grad_()
    found = log_probs_of_labels(x, labels)
    assert torch.equal(found, whole)
    found.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.float().sum(-1).abs().max() < 2e-2  # rows sum to zero, up to bf16


def test_shape_follows_the_labels():
    logits, labels = inputs(12, torch.bfloat16)
    flat = log_probs_of_labels(logits, labels)
    shaped = log_probs_of_labels(logits.view(3, 4, 97), labels.view(3, 4))
    assert torch.equal(shaped.flatten(), flat)
    assert shaped.shape == (3, 4)


def test_no_tokens_have_no_log_probs():
    logits, labels = inputs(0, torch.bfloat16)
    found = log_probs_of_labels(logits.requires_grad_(), labels)
    assert (found.shape, found.dtype) == ((0,), torch.float32)
    found.sum().backward()
    assert logits.grad.shape == (0, 97)
