"""What a kernel leaves unwritten is seen."""

import torch


def poison(*shape: int) -> None:
    """The next output of this size comes from memory full of NaN."""
    torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
