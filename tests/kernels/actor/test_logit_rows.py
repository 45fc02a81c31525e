"""The Triton kernels on a GPU against float64."""

import pytest
import torch
from qerl_testing import assert_close

from verl_qerl.kernels.actor.log_probs import linear_log_probs
from verl_qerl.kernels.actor.logit_rows import gradient_of_rows, score_rows

pytestmark = pytest.mark.gpu

QWEN = 151936
SHAPES = [(1, 2), (3, 100), (5, 4096), (33, 12289), (64, QWEN)]
BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-4}  # halves are rounded once


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_by_float64(shape, dtype, temperature, entropy):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(shape, generator=generator, device="cuda")).to(dtype)
    labels = torch.randint(shape[1], (shape[0],), generator=generator, device="cuda")
    labels[-1] = shape[1] - 1
    exact = logits.double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    log_probs, entropies = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = score_rows(logits, labels, temperature, entropy, fused=True)
    # Values of up to 40 have steps of 4e-6 in float32.
    assert (found[0] - log_probs).abs().max() < 1e-5
    assert (found[1] - (exact / temperature).logsumexp(-1)).abs().max() < 1e-5
    assert (found[2] - entropies * entropy).abs().max() < 1e-5
    grads = [torch.linspace(*ends, shape[0], device="cuda") for ends in ((-1, 1), (2, -1))]
    ((log_probs * grads[0]).sum() + (entropies * grads[1] * entropy).sum()).backward()
    of_entropy = grads[1] if entropy else None
    made = gradient_of_rows(logits, labels, temperature, found[1:], (grads[0], of_entropy), fused=True)
    assert made.dtype == dtype
    assert_close(made, exact.grad, BOUNDS[dtype])


def test_more_elements_than_an_int32_counts():
    logits = torch.randn(1, QWEN, device="cuda", dtype=torch.bfloat16).repeat(14200, 1)
    labels = torch.full((14200,), 7, device="cuda")
    assert logits.numel() > 2**31
    log_probs, log_sums, entropies = score_rows(logits, labels, 1.0, True, fused=True)
    assert torch.equal(log_probs, log_probs[:1].expand(14200))
    assert torch.equal(entropies, entropies[:1].expand(14200))
    scored = (log_sums, entropies)
    expected = gradient_of_rows(logits[:1].clone(), labels[:1], 1.0, scored, (log_probs, None), fused=True)
    made = gradient_of_rows(logits, labels, 1.0, scored, (log_probs, None), fused=True)
    assert torch.equal(made[-1], expected[0])


@pytest.mark.parametrize("entropy", [False, True])
def test_a_head_by_what_torch_computes_of_the_same_logits(entropy):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator, device="cuda").bfloat16() for n in (2500, 5000))
    weight *= 0.3
    labels = torch.randint(5000, (2500,), generator=generator, device="cuda")
    x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found = linear_log_probs(x, weight, labels, 0.9, entropy, fused=True)
    log_p = ((y @ weight.t()).float() / 0.9).log_softmax(-1)
    expected = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) * entropy
    for values, exact in zip(found, expected, strict=True):
        assert_close(values.detach(), exact.detach(), 1e-4)
    sum(part.sum() for part in found).backward()
    sum(part.sum() for part in expected).backward()
    assert_close(x.grad, y.grad, 3 * 2**-8)
