"""An NVFP4Linear that decodes from the rollout's layout, so that both can read the same bytes."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_qerl.formats import PackedWeight
from verl_qerl.kernels.rollout.repacking import Repacked, decode, undo_repack
from verl_qerl.modules.format_linear import NVFP4Linear


class RepackedNVFP4Linear(NVFP4Linear):
    """NVFP4Linear over tensors that another process may read too; made from a filled one by `hold`.

    They are plain attributes, no buffers: nothing that moves, casts or saves a module reaches them. In bf16 the decoded
    weight has the bits of NVFP4Linear's; another dtype gets the bf16 numbers, which are exact where the global scale is
    a power of two, as in everything that we quantize.

    Attributes:
        tiles: packed codes [K / 16, 2 N] int32 and scale [K / 16, N] uint8, columns of those of linears stacked along
            N, and global_decode_scale [1] float32.
        weight, weight_scale, weight_decode_scale: Empty.
    """

    tiles: Repacked

    @staticmethod
    def hold(linear: NVFP4Linear, tiles: Repacked) -> None:
        """Make `linear` decode from `tiles`, in place; its own packed tensors are freed."""
        for name in ("weight", "weight_scale", "weight_decode_scale"):
            setattr(linear, name, torch.empty(0, dtype=torch.uint8, device=tiles[0].device))
        linear.__class__ = RepackedNVFP4Linear
        linear.tiles = tiles  # type: ignore[attr-defined]

    def fill(self, packed: PackedWeight) -> None:
        """Always raise RuntimeError: the bytes are another process's too."""
        raise RuntimeError("a shared base cannot be filled again: qerl.base.share=true. Start another run.")

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A copy of the tensors in a checkpoint's layout; see `PackedLinear.tensors`."""
        packed = undo_repack(*self.tiles)
        return packed.codes, packed.block_scale.view(torch.uint8), self.tiles[2].view(torch.uint8)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [N, K] of `dtype`."""
        return decode(*self.tiles).to(dtype)

    @classmethod
    def decode_siblings(cls, linears: Sequence[Any], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """See `PackedLinear.decode_siblings`; NVFP4Linear's one launch cannot read tiles."""
        return super(NVFP4Linear, cls).decode_siblings(linears, dtype)
