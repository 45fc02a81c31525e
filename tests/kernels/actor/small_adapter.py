"""How much of an adapter that is far smaller than a rounding step arrives in the outputs."""

import torch

from verl_qerl.kernels.actor.adapted_linear import FrozenWeights, adapted_linears

TOKENS, K, N, RANK = 4096, 256, 256, 8
STEP = 4e-5  # B after one step of Adam at this learning rate


def share_that_arrives(device: str, bias: float | None) -> float:
    """Mean change of the outputs over that of the adapter's term, with products in bf16: 1 where nothing is lost.

    The term is about 1/200 of a rounding step of an output. Added before the output is rounded it moves one in 200 of
    them by a step, as many as it should; added to what is rounded already it moves none.

    Args:
        device: Of the products.
        bias: Of all outputs, or None.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    x, W, A = draw(TOKENS, K).abs(), draw(N, K) / 8, draw(RANK, K).abs() / 16
    weights = FrozenWeights(lambda _: [W], lambda _: [W])
    biases = [None if bias is None else torch.full((N,), bias, dtype=torch.bfloat16, device=device)]
    changed, plain = (
        adapted_linears(x, weights, [A], [torch.full((N, RANK), size, dtype=x.dtype, device=device)], [1.0], biases)[0]
        for size in (STEP, 0.0)
    )
    term = (x.float() @ A.float().T).sum(1).mean() * STEP
    return float((changed.double() - plain.double()).mean() / term)
