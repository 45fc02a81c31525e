"""Tensors that FSDP2 spread over the files of several ranks, put together again and cut for other ranks."""

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # also for weights_only

from verl_qerl.errors import CheckpointFormatError


def sharding_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks that FSDP2 spreads a tensor over: those along the last dimension."""
    return mesh.get_group(mesh.ndim - 1)


def join_shards(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Whole tensors of a model.

    Args:
        files: One file per rank, in the order of the ranks, each name -> tensor.

    Returns:
        name -> tensor on the CPU. What is not sharded is the first rank's.

    Raises:
        CheckpointFormatError: A file is cut, or the ranks do not fit together.
    """
    shards = load_shards(files)
    folder = files[0].parent
    for name, tensor in shards[0].items():
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise unfit(folder, f"rank 0 holds {name!r}, which is no name of a tensor")
    for rank, shard in enumerate(shards):
        if shard.keys() != shards[0].keys():
            raise unfit(folder, f"rank {rank} holds other names than rank 0")
    return {name: join_tensor(folder, name, [shard[name] for shard in shards]) for name in shards[0]}


def load_shards(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The contents of files of torch.save, mapped: what is not used is not read.

    Raises:
        CheckpointFormatError: A file is cut or is something else.
    """
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)  # torch warns that a mesh without process groups cannot be compiled
    try:
        return [_load(file) for file in files]
    finally:
        logger.setLevel(level)


def join_tensor(folder: Path, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put one tensor together; a plain one is the same on every rank.

    Args:
        parts: One per rank, in the order of the ranks.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    ranks, dim = _ranks(folder, name, first)
    if max(ranks) >= len(parts):
        raise unfit(folder, f"{name!r} is sharded over ranks {ranks}")
    found = []
    for rank in ranks:
        part = parts[rank]
        if not isinstance(part, DTensor) or part.shape != first.shape:
            raise unfit(folder, f"rank {rank} holds {name!r} with another shape than rank 0")
        found.append(part.to_local().detach())
    whole = found[0] if dim is None else torch.cat(found, dim)
    if whole.shape != first.shape:
        raise unfit(folder, f"the parts of {name!r} make {tuple(whole.shape)}, not {tuple(first.shape)}")
    return whole


def cut_like(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, placed as `target` is; `whole` itself when `target` is a plain tensor."""
    if not isinstance(target, DTensor):
        return whole
    # Every rank holds the whole tensor, so nothing is sent.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def unfit(folder: Path, what: str) -> CheckpointFormatError:
    """The error of shards that do not belong together."""
    return CheckpointFormatError(
        f"the checkpoint cannot be put together: {what} in {folder}. A LoRA checkpoint of verl's FSDP2 engine is "
        "accepted. Take another step."
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PermissionError:  # a whole file, which another copy would not mend
        raise
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError) as error:  # OSError: of the map
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointFormatError(
            f"a shard cannot be read: {path} ({reason[:120]}). A whole file of torch.save is accepted. "
            "It may be cut short: copy it again or take another step."
        ) from error
    if not isinstance(found, dict):
        raise unfit(path.parent, f"{path.name} holds a {type(found).__name__} in place of names and their tensors")
    return found


def _ranks(folder: Path, name: str, tensor: DTensor) -> tuple[list[int], int | None]:
    """(ranks whose parts are needed, in order; the dimension they are joined in)."""
    mesh = tensor.device_mesh.mesh
    dim, axis = None, 0
    for placement in tensor.placements:
        if type(placement) is Replicate:
            mesh = mesh.select(axis, 0)
        elif type(placement) is Shard and dim is None:
            dim, axis = placement.dim, axis + 1
        else:
            raise unfit(folder, f"{name!r} is placed as {tensor.placements}; FSDP2 and its replicas are known")
    return mesh.reshape(-1).tolist(), dim


def join_optimizer(files: Sequence[Path]) -> dict[str, Any]:
    """The state of an optimizer with its tensors whole.

    Args:
        files: One `state_dict` of the optimizer per rank, in the order of the ranks.

    Raises:
        CheckpointFormatError: A file is cut, or the ranks do not fit together.
    """
    shards = load_shards(files)
    folder = files[0].parent
    states: list[Mapping[int, Mapping[str, torch.Tensor]]] = [shard["state"] for shard in shards]
    joined = {}
    for index, entries in states[0].items():
        if any(index not in state or state[index].keys() != entries.keys() for state in states):
            raise unfit(folder, f"the ranks hold other optimizer states of parameter {index}")
        joined[index] = {
            key: join_tensor(folder, f"{key} of parameter {index}", [state[index][key] for state in states])
            for key in entries
        }
    return {**shards[0], "state": joined}
