"""Triton kernels launched again without Triton's search for what it has compiled.

The search takes the host longer than a small kernel takes the GPU; a training pass of few tokens waits for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

_ALIGNED = 16  # bytes: Triton compiles a kernel for pointers with and without


class TritonLauncher:
    """A kernel of triton.jit with its parameters in this order: tensors, integers, constexprs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launch on the current stream, of the device that has the tensors."""
        # All that Triton compiles for: values of integers, where it asks for less of them, do no harm.
        key = (tensors[0].device, tuple([tensor.dtype for tensor in tensors]), integers, constants, num_warps)
        places = [tensor.data_ptr() for tensor in tensors]
        aligned, compiled = not any(place % _ALIGNED for place in places), self._compiled.get(key)
        if aligned and compiled:
            compiled[(*grid, 1)](*places, *integers, *constants)  # of tensors the driver would be asked for each place
            return
        compiled = self._kernel[grid](*tensors, *integers, *constants, num_warps=num_warps)
        if aligned:
            self._compiled[key] = compiled  # None by Triton's interpreter
