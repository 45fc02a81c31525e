"""Log-probs and entropies of bf16 logits are float32, and a token more is not a kernel more."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_v2


class CountOperators(TorchDispatchMode):
    """Counts what torch dispatches, one kernel or view each."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(num_tokens: int) -> int:
    with CountOperators() as counter:
        logprobs_from_logits_v2(logits[:num_tokens], labels[:num_tokens])
    return counter.count


generator = torch.Generator().manual_seed(0)
logits = (torch.randn(50, 97, generator=generator) * 3).bfloat16()
labels = torch.randint(97, (50,), generator=generator)
expected = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]

found = logprobs_from_logits_v2(logits, labels)
assert found.dtype == torch.float32, f"log-probs of bf16 logits are {found.dtype}"
error = (found.double() - expected).abs().max().item()
assert error < 1e-4, f"log-probs of bf16 logits are off by {error}"
few, many = operators(10), operators(50)
assert few == many, f"10 tokens take {few} operators and 50 tokens {many}"

log_p = logits.double().log_softmax(-1)
with torch.autocast("cpu", torch.bfloat16):
    entropy = entropy_from_logits(logits)
assert entropy.dtype == torch.float32, f"entropies of bf16 logits are {entropy.dtype}"
error = (entropy.double() + (log_p.exp() * log_p).sum(-1)).abs().max().item()
assert error < 1e-5, f"entropies of bf16 logits are off by {error}"
