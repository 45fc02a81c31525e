"""The actor's adapter as one tensor on its way to the rollout: gathered in one collective, sent in a few pieces.

verl gathers every tensor by itself, copies it to the host and from there into the buffer that the rollout sees.
"""

import re
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from verl_qerl.algos.trained_norms import shifted_norm
from verl_qerl.checkpoints.manifest import checksum
from verl_qerl.modules.placement.shards import sharding_group
from verl_qerl.vllm_plugin.adapter.buffers import Layout

# A message of verl's transfer holds as many pieces as its bucket does; one piece fits the smallest bucket in use.
PIECE_BYTES = 16 << 20
_PIECE = re.compile(r"verl_qerl_adapter\.(\d+)")


class FlatAdapter:
    """The adapter of a PEFT model under FSDP2, or of one that is not sharded.

    Args:
        names: Name that the rollout knows -> name of a parameter [rows, columns] of `module`, whole or sharded by rows.
            What shifts a norm is a vector: rows of one column, after all matrices.
        device: Where the collective runs and the result lies.

    Raises:
        ValueError: A parameter is no matrix, or sharded in another way.
    """

    def __init__(self, module: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
        names = {name: names[name] for name in sorted(names, key=_is_norm)}  # else in their order
        # Owners, not parameters: those are other objects while FSDP2 has them gathered.
        self._owners = [
            (module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in names.values()
        ]
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._device = device
        parameters = dict(zip(names, self._parameters(), strict=True))
        for name, parameter in parameters.items():
            if parameter.ndim != 2 - _is_norm(name):
                raise ValueError(
                    f"{name} of the adapter is {tuple(parameter.shape)}. Accepted are matrices: train lora_A and lora_B"
                    " alone, without biases or modules_to_save."
                )
        shapes = {name: (one.shape[0], one.numel() // one.shape[0]) for name, one in parameters.items()}
        self.layout: Layout = tuple(shapes.items())
        self._group = _group(parameters)

    def _parameters(self) -> list[torch.Tensor]:
        for unit in self._units:
            unit.reshard()  # nothing to do, unless the last pass left it gathered
        return [getattr(owner, leaf) for owner, leaf in self._owners]

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """The parameters one after the other in the order of `layout`, in their dtype; on every rank."""
        local = [one.to_local() if isinstance(one, DTensor) else one for one in self._parameters()]
        size = dist.get_world_size(self._group) if self._group is not None else 1
        if size == 1:
            return torch.cat([tensor.reshape(-1).to(self._device) for tensor in local])
        # Ranks hold ceil(rows / size) rows each, the last ones fewer or none.
        rows = [-(-shape[0] // size) for _, shape in self.layout]
        counts = [count * shape[1] for count, (_, shape) in zip(rows, self.layout, strict=True)]
        mine = torch.zeros(sum(counts), dtype=local[0].dtype, device=self._device)
        for part, tensor in zip(mine.split(counts), local, strict=True):
            part[: tensor.numel()].copy_(tensor.reshape(-1))
        gathered = mine.new_empty(size * mine.numel())
        dist.all_gather_into_tensor(gathered, mine, group=self._group)
        parts = zip(gathered.view(size, -1).split(counts, dim=1), self.layout, strict=True)
        return torch.cat([part.reshape(-1)[: shape[0] * shape[1]] for part, (_, shape) in parts])


def adapter_checksum(flat: torch.Tensor) -> int:
    """Checksum of an adapter that both sides can compute: of its bf16 values, which rollouts take."""
    return int(checksum(flat.to(torch.bfloat16)))


def pieces(flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What is sent: parts of `flat` under names that tell their place."""
    step = PIECE_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield f"verl_qerl_adapter.{start}", flat[start : start + step]


class FlatReceiver:
    """Puts pieces together, rounded to `dtype`."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(numel, dtype=dtype, device=device)
        self._found: dict[int, int] = {}
        self._stray: list[str] = []

    def add(self, bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        """Copy pieces, whose memory the sender will use again. Never raises: the sender would wait for ever."""
        for name, piece in bucket:
            match = _PIECE.fullmatch(name)
            start = int(match[1]) if match else -1
            if start < 0 or piece.ndim != 1 or start + piece.numel() > self._flat.numel():
                self._stray.append(name)
                continue
            self._flat[start : start + piece.numel()].copy_(piece)
            self._found[start] = piece.numel()

    def whole(self) -> torch.Tensor:
        """The result; a ValueError if a piece is missing, or one has come that does not belong to it."""
        end = 0
        for start, count in sorted(self._found.items()):
            if start != end:
                break
            end += count
        if self._stray or end != self._flat.numel() or end != sum(self._found.values()):
            raise ValueError(
                f"the adapter did not arrive as it was announced: {sum(self._found.values())} of {self._flat.numel()}"
                f" numbers, {len(self._stray)} strange tensors {self._stray[:1]}. Nothing was written. This is a defect"
                " of verl_qerl: report it."
            )
        return self._flat


def _is_norm(name: str) -> bool:
    return shifted_norm(name) is not None


def _group(parameters: Mapping[str, torch.Tensor]) -> dist.ProcessGroup | None:
    """The ranks that hold the shards, None where every rank holds all."""
    groups = {}
    for name, parameter in parameters.items():
        group = None
        if isinstance(parameter, DTensor):
            *others, last = parameter.placements
            if any(place.is_shard() for place in others) or not (last == Shard(0) or last.is_replicate()):
                raise ValueError(
                    f"{name} of the adapter is sharded as {parameter.placements}. Accepted are rows, by FSDP2. Set"
                    " actor_rollout_ref.actor.strategy=fsdp2."
                )
            group = sharding_group(parameter.device_mesh) if last.is_shard() else None
        groups.setdefault(None if group is None else tuple(dist.get_process_group_ranks(group)), group)
    if len(groups) != 1:
        raise ValueError(
            f"the parameters of the adapter are spread over {len(groups)} groups of ranks. Accepted is one. Wrap all of"
            " them alike."
        )
    return next(iter(groups.values()))
