"""How much of the first updates of a LoRA adapter reaches the log-probs, by where it is summed; in emulated bf16.

    python tests/bench/bench_small_adapter.py --model DIR --questions gsm8k/train.jsonl --out FILE.json

A bf16 model and an adapter whose B is what Adam makes of it in its first updates: the learning rate times their number,
with the sign of the gradient, here that of solutions' log-probs. The linears compute in float32 and round where bf16
products would, so it needs no GPU and tells of no kernel:

    exact    the adapter's term is summed before the output is rounded, as in kernels/rollout
    after    base output and term are rounded, then added, as PEFT and vLLM do
    merged   the term is added to the weight, which is rounded, as with model.lora.merge
    none     without the adapter

Questions that gave the gradient are not those that are asked.
"""

from collections.abc import Iterator
from typing import Any

import torch
from first_updates import Text, learn, log_probs, of_tokens, rounded, run
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear

KINDS = ("exact", "after", "merged", "none")
RANK, ALPHA = 32, 64


def output(linear: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
    """[..., K] -> [..., N] of a LoRA linear with bf16 weights, all in float32."""
    x, base = rounded(x), linear.base_layer
    A, B = (rounded(getattr(linear, name)["default"].weight) for name in ("lora_A", "lora_B"))
    scaling = linear.scaling["default"]
    if kind == "merged":
        return rounded(torch.nn.functional.linear(x, rounded(base.weight + scaling * (B @ A)), base.bias))
    y, term = base(x), rounded(x @ A.T * scaling) @ B.T
    return rounded({"exact": y + term, "after": rounded(y) + rounded(term), "none": y}[kind])


def measure(
    model: Any, learned: list[Text], asked: list[Text], updates: list[int], lr: float
) -> Iterator[dict[str, Any]]:
    """A row for each number of updates.

    Args:
        model: Causal language model, float32 with values of bf16; gets an adapter.
        learned: Texts of the gradient.
        asked: Other texts.
        updates: Of Adam, all with the sign of this gradient.
    """
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))
    learn(model, learned)
    Bs = [p for name, p in model.named_parameters() if "lora_B" in name]
    signs = [B.grad.sign() for B in Bs]
    linears = [module for module in model.modules() if isinstance(module, LoraLinear)]
    with torch.no_grad():
        for count in updates:
            for B, sign in zip(Bs, signs, strict=True):
                B.copy_(-lr * count * sign)
            found = {}
            for kind in KINDS:
                for linear in linears:
                    linear.forward = lambda x, linear=linear, kind=kind: output(linear, x, kind)
                found[kind] = [log_probs(model, text) for text in asked]
            yield {"updates": count, "tokens": sum(map(len, found["exact"]))} | summary(found, asked)


def summary(found: dict[str, list[torch.Tensor]], asked: list[Text]) -> dict[str, Any]:
    """Share of the log-probs' gain that arrives, and nats per token of KL(exact || kind)."""
    gains = {
        kind: torch.cat([of_tokens(one, text) for one, text in zip(ones, asked, strict=True)]).mean().item()
        for kind, ones in found.items()
    }
    whole = gains["exact"] - gains["none"]
    exact = torch.cat(found["exact"])
    kls = {kind: (exact.exp() * (exact - torch.cat(ones))).sum(-1).mean().item() for kind, ones in found.items()}
    shares = {kind: (gain - gains["none"]) / whole for kind, gain in gains.items()}
    return {"mean_log_prob": gains, "share_of_gain": shares, "kl_from_exact": kls}


if __name__ == "__main__":
    run(__doc__, measure, texts=2, updates=(1, 2, 8), lr=4e-5)
