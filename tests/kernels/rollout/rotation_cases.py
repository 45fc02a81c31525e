"""Heads to rotate, for a CPU, a GPU and an emulated one."""

import torch


def heads(
    tokens: int, size: int, q_heads: int = 3, k_heads: int = 2, positions: int = 40, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """q and k as slices of a fused linear's output, positions, and the table of so many."""
    generator = torch.Generator().manual_seed(tokens * size)
    whole = torch.randn(tokens, (q_heads + 2 * k_heads) * size, generator=generator).bfloat16().to(device)
    q, k, _ = whole.split([q_heads * size, k_heads * size, k_heads * size], 1)
    places = torch.randint(0, positions, (tokens,), generator=generator).to(device)
    return q, k, places, torch.randn(positions, size, generator=generator).bfloat16().to(device)


def head_norms(size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[torch.Tensor]:
    """Weights of q's and of k's norms."""
    generator = torch.Generator().manual_seed(size)
    return [(1 + 0.1 * torch.randn(size, generator=generator)).to(device, dtype) for _ in range(2)]
