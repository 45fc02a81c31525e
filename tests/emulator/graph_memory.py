"""Memory of a CUDA graph: what a tensor leaves goes to the next one, while kernels that use it may still be to come."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

ROUND = 512  # bytes


class Pool:
    """Hands out the smallest free block that fits, as torch's caching allocator does; a tensor's block is free at once
    when `give` takes it back. New memory is full of NaN.

    Args:
        size: Bytes in all.
    """

    def __init__(self, size: int = 16 << 20) -> None:
        self._memory = torch.full((size // 2,), torch.nan, dtype=torch.bfloat16).view(torch.uint8)
        self._free = [(-self._memory.data_ptr() % ROUND, size - ROUND)]
        self._taken: dict[int, tuple[int, int]] = {}

    def empty(self, *shape: Any, dtype: torch.dtype = torch.bfloat16, **_: Any) -> torch.Tensor:
        """As torch.empty."""
        shape = torch.Size(shape[0] if isinstance(shape[0], tuple | torch.Size) else shape)
        size = shape.numel() * dtype.itemsize
        room = -(-size // ROUND) * ROUND
        start, length = min((block for block in self._free if block[1] >= room), key=lambda block: block[1])
        self._free.remove((start, length))
        if length > room:
            self._free.append((start + room, length - room))
        out = self._memory[start : start + size].view(dtype).view(shape)
        self._taken[out.data_ptr()] = (start, room)
        return out

    @contextlib.contextmanager
    def scratch(self) -> Iterator[list[torch.Tensor]]:
        """Takes back what was handed out inside, but for the tensors that are put into the list."""
        before, kept = set(self._taken), []
        yield kept
        self._give(set(self._taken) - before - {tensor.data_ptr() for tensor in kept})

    def give(self, *tensors: torch.Tensor) -> None:
        """Take blocks back."""
        self._give({tensor.data_ptr() for tensor in tensors})

    def _give(self, addresses: set[int]) -> None:
        """Neighbours become one."""
        self._free += [self._taken.pop(address) for address in addresses]
        merged: list[tuple[int, int]] = []
        for start, length in sorted(self._free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
