"""All packed linears of a model in one piece of memory, in the layout that actor and rollout decode from.

Linears that vLLM runs as one (q, k, v; gate, up) are stacked along N and repacked together
(`kernels.rollout.repacking`). Rows of such a stack are columns of the result, so that the actor reads its q, k and v in
place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn

from verl_qerl.formats.nvfp4 import BLOCK_SIZE, nvfp4_weight
from verl_qerl.formats.nvfp4_layout import fused_group
from verl_qerl.kernels.rollout.repacking import ROWS, Repacked, repack
from verl_qerl.modules.convert import packed_linears
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.nvfp4_experts import NVFP4Experts
from verl_qerl.modules.placement.repacked_linear import RepackedNVFP4Linear

_ALIGNMENT = 256  # bytes, at which every group starts


@dataclass(frozen=True)
class RepackedGroup:
    """Linears stacked along N, and where their tiles are.

    Attributes:
        members: Names as in a checkpoint, in vLLM's order.
        rows: out_features of each, multiples of 64.
        columns: in_features.
        offset: Where the packed codes start, which block scales and four bytes of the global scale follow.
    """

    members: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes from `offset` to where the next group may start."""
        N = sum(self.rows)
        used = N * self.columns // 2 + N * self.columns // BLOCK_SIZE + 4
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def tiles(self, flat: torch.Tensor) -> Repacked:
        """Words [K / 16, 2 N] int32, scale [K / 16, N] uint8 and global_decode_scale [1] float32 within the bytes."""
        N, blocks = sum(self.rows), self.columns // BLOCK_SIZE
        codes, scales = N * self.columns // 2, N * blocks
        packed_codes, scale, decode_scale = flat[self.offset : self.offset + codes + scales + 4].split(
            [codes, scales, 4]
        )
        return (
            packed_codes.view(torch.int32).view(blocks, 2 * N),
            scale.view(blocks, N),
            decode_scale.view(torch.float32),
        )

    def member_tiles(self, flat: torch.Tensor) -> list[Repacked]:
        """The tiles of each member, slices of the columns of `tiles`."""
        packed_codes, scale, decode_scale = self.tiles(flat)
        parts = zip(packed_codes.split([2 * n for n in self.rows], 1), scale.split(self.rows, 1), strict=True)
        return [(some_words, some_scale, decode_scale) for some_words, some_scale in parts]


@dataclass(frozen=True)
class SharedBase:
    """The bytes, and what is where.

    Attributes:
        flat: uint8.
        groups: In the order of the model.
    """

    flat: torch.Tensor
    groups: tuple[RepackedGroup, ...]


def share_base(model: nn.Module) -> SharedBase:
    """Move the packed linears of a model into one piece of memory that can be given to another process, and read there.

    On a CPU it is shared memory with a name; on a GPU what CUDA's allocator gives, which must not be an expandable
    segment: those have no IPC handle.

    Args:
        model: On its device; its NVFP4Linears become RepackedNVFP4Linears.

    Raises:
        ValueError: It has experts, sharded linears or none, or an out_features that tiles do not divide.
    """
    linears = {name: linear for name, linear in packed_linears(model) if isinstance(linear, NVFP4Linear)}
    groups = _groups(model, linears)
    flat = _memory(sum(group.num_bytes for group in groups), next(iter(linears.values())).weight.device)
    for group in groups:
        members = [linears[name] for name in group.members]
        codes, scales, decode_scales = zip(*(linear.tensors() for linear in members), strict=True)
        scale_of_all = decode_scales[0].view(torch.float32)
        stacked = nvfp4_weight(torch.cat(codes), torch.cat(scales).view(torch.float8_e4m3fn), scale_of_all)
        for there, part in zip(group.tiles(flat), repack(stacked), strict=True):
            there.copy_(part)
        for linear, tiles in zip(members, group.member_tiles(flat), strict=True):
            RepackedNVFP4Linear.hold(linear, tiles)
    return SharedBase(flat, tuple(groups))


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    with shared_by_name():
        return torch.empty(num_bytes, dtype=torch.uint8).share_memory_()


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Give shared memory a name: torch's other strategy hands over file descriptors, which only a child could take."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _groups(model: nn.Module, linears: dict[str, NVFP4Linear]) -> list[RepackedGroup]:
    odd = sorted({type(linear).__name__ for _, linear in packed_linears(model) if type(linear) is not NVFP4Linear})
    if any(isinstance(module, NVFP4Experts) for module in model.modules()):
        odd.append(NVFP4Experts.__name__)
    if odd or not linears:
        raise ValueError(
            f"qerl.base.share=true is not possible: {', '.join(odd) or 'no packed linear'} in the model."
            " Accepted are plain NVFP4Linears, whole on each rank. Leave the option out."
        )
    groups: dict[str, RepackedGroup] = {}
    offset = 0
    for name, linear in linears.items():
        if linear.out_features % ROWS:
            raise ValueError(
                f"qerl.base.share=true is not possible: {name!r} has {linear.out_features} rows."
                f" Multiples of {ROWS} are accepted. Leave the option out."
            )
        key, members = fused_group(name)
        if key not in groups:
            held = tuple(member for member in members if member in linears)
            rows = tuple(linears[member].out_features for member in held)
            groups[key] = RepackedGroup(held, rows, linear.in_features, offset)
            offset += groups[key].num_bytes
    return list(groups.values())
