"""A bf16 copy of the packed base that lives only while the actor computes."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from verl_qerl.modules.packed_linear import PackedLinear

logger = logging.getLogger(__name__)


class DenseBase:
    """Decodes the base when the actor starts a phase and gives the copy back at its end, before the rollout wakes.

    On a GPU the first update computes from the packed base: it shows how much memory the passes take.
    The copy is made from then on if it fits beside that, which is decided once and said.

    Attributes:
        fits: None as long as nothing is known.
    """

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self._linears = linears
        self.num_bytes = sum(2 * linear.in_features * linear.out_features for linear in linears)
        self.fits: bool | None = None if torch.cuda.is_available() else True

    @contextmanager
    def within(self, mode: AbstractContextManager[Any], training: bool) -> Iterator[Any]:
        """`mode`, and inside it the copy; after the first one that trains it is known whether the copy fits."""
        linear: PackedLinear
        with mode as entered:
            undecided = self.fits is None and training
            if undecided:  # what loading took is no part of the passes
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() if undecided else 0
            if self.fits:
                for linear in self._linears:
                    linear.dense = linear.decode(torch.bfloat16)
            try:
                yield entered
            finally:
                for linear in self._linears:
                    linear.dense = None
            if undecided:
                self._decide(torch.cuda.max_memory_allocated() - held)

    def _decide(self, working: int) -> None:
        free, _ = torch.cuda.mem_get_info()
        reusable = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        self.fits = self.num_bytes + working <= free + reusable
        logger.warning(
            "keep_dense: the bf16 base takes %.1f GiB beside %.1f GiB of the passes, %.1f GiB are free: %s",
            *(number / 2**30 for number in (self.num_bytes, working, free + reusable)),
            "kept from now on" if self.fits else "the base stays packed",
        )
