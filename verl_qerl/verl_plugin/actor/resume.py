"""Whether an engine may load a checkpoint, decided by all ranks together and before anything is read into the model.

verl reads `model_world_size_W_rank_R.pt` and its neighbours into whatever model it has. The record that our engine
writes last, after the files of all ranks, tells a whole checkpoint from one that a crash cut short.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from verl_qerl.checkpoints.digest import differing_weights
from verl_qerl.checkpoints.record import RECORD, BaseRecord, damaged_file, file_mark, read_record
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.modules.placement.shards import cut_like, join_optimizer, join_shards

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# verl's name for a part of a checkpoint -> how the files of a rank begin.
_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
PARTS = tuple(_FILES)
# What rank 0 writes beside the shards, after them.
_BESIDE = ("fsdp_config.json", "lora_train_meta.json")


def file_name(part: str, world_size: int, rank: int) -> str:
    """File of a rank, as verl names it; `part` is model, optimizer or extra."""
    return f"{_FILES[part]}_world_size_{world_size}_rank_{rank}.pt"


def saved_files(folder: Path, parts: Sequence[str]) -> dict[str, list[int]]:
    """Name -> `file_mark` of what all ranks have saved; each rank looks at its own, which may be on another node.

    Args:
        parts: `save_contents`, a list or, as verl takes it too, the name of one part.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = [file_name(part, world_size, rank) for part in _FILES if part in parts]
    names += [name for name in _BESIDE if rank == 0 and (folder / name).is_file()]
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, {name: file_mark(folder / name) for name in names})
    return {name: mark for files in of_ranks for name, mark in files.items()}


def read_on_first_rank(read: Callable[[], _T]) -> _T:
    """What `read` finds, or the CheckpointFormatError that it raises, on rank 0, whose node alone may have the file.

    The driver, which is of no group of ranks, reads itself.
    """
    if not dist.is_initialized():
        return read()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = read()
        except CheckpointFormatError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise CheckpointFormatError(told[1])
    return told[0]


def check_checkpoint(folder: Path, held: BaseRecord, parts: Sequence[str]) -> BaseRecord:
    """Require that the checkpoint is whole and belongs to this model.

    Args:
        held: What the engine would write of its own base, adapter and ranks.
        parts: What is to be loaded: of model, optimizer, extra.

    Returns:
        The record of the checkpoint, the same on every rank.

    Raises:
        CheckpointFormatError: It is half-written, cut, or of another base, adapter or number of ranks; on every rank.
    """

    def read() -> BaseRecord:
        record = read_record(folder)
        if record and record.files:
            return record
        raise CheckpointFormatError(
            f"the checkpoint is half-written, or not of this engine: {folder} has no {RECORD} that lists its files. "
            "It is written after everything else, by runs with +rollout and an adapter alone. Resume from an earlier"
            " step, with the options that it was saved with, or set trainer.resume_mode=disable to start anew."
        )

    record = read_on_first_rank(read)
    problem = (
        _other_model(folder, record, held) or _other_ranks(folder, record, held) or _cut(folder, record, held, parts)
    )
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for told in problems:
        if told:
            raise CheckpointFormatError(told)
    return record


def check_options(folder: Path, form: str, adapter: Mapping[str, Any]) -> None:
    """Require what the options of a run tell before it has a model; `check_checkpoint` requires the rest.

    Args:
        folder: The actor's part of a checkpoint.
        form: Name of the base's format.
        adapter: Options of PEFT's LoraConfig, those that the run names.

    Raises:
        CheckpointFormatError: The checkpoint has others.
    """
    if record := read_record(folder):
        problem = _other_format(folder, record.format, form)
        problem = problem or _other_adapter(folder, {name: record.adapter.get(name) for name in adapter}, adapter)
        if problem:
            raise CheckpointFormatError(problem)


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointFormatError, on every rank, where the checkpoint is of an adapter on a packed base."""
    if record := read_on_first_rank(lambda: read_record(folder)):
        raise CheckpointFormatError(
            f"the checkpoint is of an adapter: lora_rank={record.adapter.get('r')}, now 0, in {folder}. One of a run"
            " of all weights is accepted. Set actor_rollout_ref.model.lora_rank as it was, or"
            " trainer.resume_mode=disable to start anew."
        )


def refuse_packed_base(folder: Path) -> None:
    """Raise CheckpointFormatError, on every rank, where the checkpoint is of a packed base, for a run that has none.

    An engine of verl's own that saves into the folder of an older checkpoint leaves the record there. Other files than
    it lists tell that.
    """
    record = read_on_first_rank(lambda: _record_of_these_files(folder))
    if record:
        raise CheckpointFormatError(
            f"the checkpoint is of an adapter on a base in {record.format}, now in bf16, in {folder}. One of a run"
            f" without +rollout is accepted. Add +rollout={record.format}, or start under another"
            " trainer.experiment_name."
        )


def _record_of_these_files(folder: Path) -> BaseRecord | None:
    record = read_record(folder)
    # Those of other ranks may lie on other nodes.
    here = {name: mark for name, mark in record.files.items() if (folder / name).is_file()} if record else {}
    return None if damaged_file(folder, here) else record


@contextmanager
def for_these_ranks(
    folder: Path,
    record: BaseRecord,
    held: BaseRecord,
    parts: Sequence[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[Path]:
    """A folder with the files that verl looks for on this rank.

    `folder` itself when as many ranks wrote it, each its own part. Otherwise a temporary one: each rank puts the shards
    together and cuts its own parts out, of adapters and their optimizer alone, which are small.
    """
    if record.lies_as(held):
        yield folder
        return
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory(prefix="verl_qerl_resume_") as name:
        for part in parts:
            files = [folder / file_name(part, record.world_size, r) for r in range(record.world_size)]
            target = Path(name) / file_name(part, held.world_size, rank)
            if part == "model":
                own = module.state_dict()
                torch.save({key: cut_like(whole, own[key]) for key, whole in join_shards(files).items()}, target)
            elif part == "optimizer" and optimizer is not None:
                torch.save(_cut_optimizer(join_optimizer(files), optimizer), target)
            elif part == "extra":
                # The scheduler is the same on every rank. A generator belongs to one rank: more ranks share them.
                shutil.copy(files[rank % record.world_size], target)
        if rank == 0:
            was, now = ((one.world_size, one.sharded_over) for one in (record, held))
            logger.warning("resuming a checkpoint of %d ranks (fsdp_size=%d) on %d (%d)", *was, *now)
        yield Path(name)


def _cut_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cut = {}
    for index, entries in state["state"].items():
        target = parameters[index]
        cut[index] = {
            key: cut_like(whole, target) if whole.shape == target.shape else whole for key, whole in entries.items()
        }
    return {**state, "state": cut}


def _other_model(folder: Path, record: BaseRecord, held: BaseRecord) -> str | None:
    if problem := _other_format(folder, record.format, held.format):
        return problem
    differing = differing_weights(record.digests, held.digests)
    if differing:
        name, total = differing[0], len(record.digests.keys() | held.digests.keys())
        return (
            f"the checkpoint is of another base: {len(differing)} of {total} weights differ, first {name!r} "
            f"({record.digests.get(name)}, now {held.digests.get(name)}), in {folder}. That of {record.base!r} with"
            f" qerl.base.scale={record.scale}, qerl.base.ignore={list(record.ignore)} is accepted. Set model.path and"
            " both."
        )
    if record.trained_norms != held.trained_norms:
        was, now = (f"qerl.base.train_norms={bool(norms)}" for norms in (record.trained_norms, held.trained_norms))
        return (
            f"the checkpoint has other trained norms: {was}, now {now}, in {folder}. The same is accepted. Set +{was}."
        )
    return _other_adapter(folder, record.adapter, held.adapter)


def _other_format(folder: Path, saved: str, now: str) -> str | None:
    if saved == now:
        return None
    return (
        f"the checkpoint is of a base in another format: {saved}, now {now}, in {folder}. The same format is accepted."
        f" Use +rollout={saved}."
    )


def _other_adapter(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in sorted(saved.keys() | now.keys()):
        was, is_now = saved.get(name), now.get(name)
        if was != is_now:
            return (
                f"the checkpoint is of another adapter: {name}={_brief(was, is_now)}, now {_brief(is_now, was)}, in "
                f"{folder}. The same options of LoRA are accepted. Set actor_rollout_ref.model.* to them."
            )
    return None


def _brief(value: Any, other: Any) -> str:
    # Target modules are listed one by one: what they have in common says nothing.
    if isinstance(value, list) and isinstance(other, list):
        return f"{len(value)} entries ({', '.join(map(str, [v for v in value if v not in other][:3])) or 'none'} alone)"
    return repr(value)


def _other_ranks(folder: Path, record: BaseRecord, held: BaseRecord) -> str | None:
    if record.lies_as(held) or record.lora_only:
        return None
    if record.world_size == held.world_size:
        size, was, now = "fsdp_size", record.sharded_over, held.sharded_over
        remedy = f"Set actor.fsdp_config.fsdp_size={was}."
    else:
        size, was, now = "world_size", record.world_size, held.world_size
        remedy = f"Resume on {was} ranks."
    return (
        f"the checkpoint is spread over other ranks: {size}={was}, now {now}, in {folder}. A LoRA-only checkpoint"
        f" (+actor.checkpoint.save_lora_only=true) resumes on any, one with the whole model on its own. {remedy}"
    )


def _cut(folder: Path, record: BaseRecord, held: BaseRecord, parts: Sequence[str]) -> str | None:
    """What is wrong with the files that this rank reads."""
    ranks = [dist.get_rank()] if record.lies_as(held) else range(record.world_size)
    names = [file_name(part, record.world_size, rank) for part in parts for rank in ranks]
    unsaved = [name for name in names if name not in record.files]
    if unsaved:
        return (
            f"the checkpoint was saved without a part that is to be loaded: {unsaved[0]} of {folder}. Parts of "
            "checkpoint.save_contents are accepted. Set checkpoint.load_contents to them."
        )
    problem = damaged_file(folder, {name: record.files[name] for name in names})
    return problem and (
        f"the checkpoint is not as it was saved: {problem} in {folder}. The files that {RECORD} lists are needed,"
        " whole. Copy them again or resume from an earlier step."
    )
