"""How much of an adapter that is far smaller than a rounding step arrives in the outputs of a linear."""

from collections.abc import Callable

import torch

STEP = 4e-5  # entries of B after one step of Adam at this learning rate


def draw(rows: int, N: int, K: int, rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows, K], W [N, K] and A [rank, K] in bf16, such that all that B = STEP adds has one sign.

    With x W^T of about 1 and x A^T of about 0.5, which is added `rank` times, a term is 1/50 of a rounding step for a
    rank of 8.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, W, A = normal(rows, K).abs(), normal(N, K) / K**0.5, normal(rank, K).abs() * 0.75 / K
    return x.bfloat16(), W.bfloat16(), A.bfloat16()


def share_that_arrives(
    product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, A: torch.Tensor, N: int
) -> float:
    """Mean change of the outputs over that of the adapter's term: 1 where nothing is lost.

    Added before the output is rounded, a term of 1/50 of a rounding step moves one in 50 outputs by a step, as many as
    it should; added to what is rounded already it moves none, or those alone that are near zero.

    Args:
        product: [N, R] of B -> [M, N], the output of the linear with its adapter.
        x: [M, K] bf16.
        A: [R, K] bf16.
        N: out_features.
    """
    B = torch.full((N, len(A)), STEP, dtype=x.dtype, device=x.device)
    changed, plain = product(B).double(), product(torch.zeros_like(B)).double()
    term = (x.double() @ A.double().T).sum(1).mean() * B[0, 0].double()
    return float((changed - plain).mean() / term)
