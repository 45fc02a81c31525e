import importlib

import pytest
import torch
from qerl_testing import assert_close

from verl_qerl.kernels.actor.log_probs import linear_log_probs, log_probs_of_labels

module = importlib.import_module("verl_qerl.kernels.actor.log_probs")


def head(dtype: torch.dtype, tokens: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(dtype) for n in (tokens, 97))
    return hidden, weight, torch.randint(97, (tokens,), generator=generator)


def whole(hidden, weight, labels, temperature):
    """(log-probs, entropies) from whole logits."""
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_of_hidden_states_by_float64(monkeypatch, chunk, temperature):
    monkeypatch.setattr(module, "_CHUNK_TOKENS", chunk)
    hidden, weight, labels = head(torch.float32)
    x, y = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found = linear_log_probs(x, weight, labels, temperature, entropy=True)
    expected = whole(y, weight.double(), labels, temperature)
    factors = torch.linspace(-1, 1, 50), torch.linspace(2, -1, 50)
    for values, exact in zip(found, expected, strict=True):
        assert_close(values.detach(), exact.detach(), 1e-5)  # an entropy is a difference of larger numbers
    sum((values * factor).sum() for values, factor in zip(found, factors, strict=True)).backward()
    sum((values * factor).sum() for values, factor in zip(expected, factors, strict=True)).backward()
    assert_close(x.grad, y.grad, 3e-5)


def test_of_hidden_states_as_of_their_bf16_logits():
    hidden, weight, labels = head(torch.bfloat16)
    found, entropy = linear_log_probs(hidden, weight, labels)
    assert torch.equal(found, log_probs_of_labels(hidden @ weight.t(), labels))
    assert (found.dtype, torch.count_nonzero(entropy)) == (torch.float32, 0)


def test_gradients_without_entropy():
    hidden, weight, labels = head(torch.bfloat16)
    x, y = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    linear_log_probs(x, weight, labels)[0].sum().backward()
    whole(y, weight.double(), labels, 1.0)[0].sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert_close(x.grad, y.grad, 3 * 2**-8)  # logits, their gradient and the result are rounded to bf16


def test_no_tensor_of_whole_logits_exists(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 8)
    hidden, weight, labels = head(torch.bfloat16, tokens=64)
    largest = []
    original = module._logits
    monkeypatch.setattr(module, "_logits", lambda part, *args: largest.append(len(part)) or original(part, *args))
    x, saved = hidden.requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        linear_log_probs(x, weight, labels)[0].sum().backward()
    assert set(largest) == {8}
    assert len(largest) == 16
    assert max(saved) <= weight.numel()


def test_a_head_that_is_trained():
    hidden, weight, labels = head(torch.float32)
    with pytest.raises(ValueError, match=r"^the output head has a gradient\. .*use_fused_kernels=False"):
        linear_log_probs(hidden, weight.requires_grad_(), labels)
