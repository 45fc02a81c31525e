"""A checkpoint of verl's FSDP2 engine: the shards of all ranks put together, and what lies beside them.

Weights that UAQ scaled come out as they are without it: nothing that reads a Checkpoint sees the scaling.

`verl.model_merger` writes a whole model and rounds adapters to bf16; LoRA-only checkpoints have no model to write.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_qerl.algos.trained_norms import split_norms
from verl_qerl.algos.uaq import read_record as read_uaq_record
from verl_qerl.algos.uaq import scaled_parameters, unfold_
from verl_qerl.checkpoints.model_config import read_object
from verl_qerl.checkpoints.record import RECORD, TRACKER, BaseRecord, damaged_file, read_record
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.modules.placement.shards import join_shards, unfit

_OTHER_STEP = "It may be cut short: export another step."
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


@dataclass(frozen=True)
class Checkpoint:
    """What one step of a run has trained.

    Attributes:
        world_size: Ranks that wrote it.
        factors: module -> (A [r, in], B [out, r]) as trained; none in a run of all weights.
        others: name in the base model -> tensor, for a checkpoint that is not LoRA-only.
        record: What our engine says of base and adapter; None when another engine wrote it.
        lora_meta: verl's own lora_train_meta.json: r and lora_alpha.
        uaq: `scale` and `base` of a run with UAQ, else None.
        norms: module -> what training added to the weight of a norm, [K] float32; see algos/trained_norms.py.
    """

    folder: Path
    world_size: int
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)
    others: Mapping[str, torch.Tensor] = field(repr=False)
    record: BaseRecord | None
    lora_meta: Mapping[str, Any]
    uaq: Mapping[str, Any] | None = None
    norms: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: The folder of the shards (`actor`), a step's folder, or a run's, whose latest step is taken.

    Raises:
        FileNotFoundError: There is no checkpoint.
        CheckpointFormatError: A rank is missing, a file is cut, or the shards do not fit together.
    """
    folder = shards_folder(path)
    record = read_record(folder)
    if record and not record.files:
        raise CheckpointFormatError(
            f"the checkpoint is half-written: {folder / RECORD} lists no files. One whose save has ended is accepted,"
            " by a verl_qerl that lists them. Export another step."
        )
    world_size = _world_size(folder)
    files = [folder / f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]
    missing = [rank for rank, file in enumerate(files) if not file.is_file()]
    if missing:
        raise CheckpointFormatError(
            f"the checkpoint lacks the shards of some ranks: missing={missing} of world_size={world_size} in {folder}. "
            "The files of all ranks are needed. Copy those of the other nodes here."
        )
    tensors, norms = split_norms(join_shards(files))
    factors, others = _sort(folder, tensors)
    uaq = read_uaq_record(folder)
    if uaq:
        for name, role in scaled_parameters(others).items():
            others[name] = unfold_(role, others[name].clone(), uaq["scale"])
    elif record and not factors:
        raise CheckpointFormatError(
            f"the checkpoint holds no adapter: {folder / RECORD} names one. The shards that it was written with are"
            " accepted. Export another step."
        )
    meta_file = folder / "lora_train_meta.json"
    meta = read_object(meta_file, _OTHER_STEP) if meta_file.is_file() else {}
    _check_norms(folder, norms, record)
    saved = {file.name: record.files[file.name] for file in files if file.name in record.files} if record else {}
    if problem := damaged_file(folder, saved):  # the shard of another rank fits too
        raise unfit(folder, problem)
    return Checkpoint(folder, world_size, factors, others, record, meta, uaq, norms)


def _check_norms(folder: Path, norms: Mapping[str, torch.Tensor], record: BaseRecord | None) -> None:
    if record and set(record.trained_norms) != {name.rpartition(".")[2] for name in norms}:
        raise unfit(folder, f"{len(norms)} norms are trained, of {list(record.trained_norms)} by its record")
    for name, shift in norms.items():
        if not bool(shift.isfinite().all()):
            raise unfit(folder, f"what {name!r} has learned holds NaN or infinite values")


def shards_folder(path: Path) -> Path:
    """Where the shards of a checkpoint lie; see `open_checkpoint`."""
    candidates = [path, path / "actor"]
    if (path / TRACKER).is_file():
        step = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        candidates.append(path / f"global_step_{step}" / "actor")
    for folder in candidates:
        if folder.is_dir() and any(folder.glob("model_world_size_*_rank_*.pt")):
            return folder
    raise FileNotFoundError(
        f"no checkpoint is found: checkpoint={path}, last looked for in {candidates[-1]}. A folder with"
        " model_world_size_*_rank_*.pt, the global_step_N above it, or a run's folder whose"
        f" {TRACKER} names one is accepted. Check the path."
    )


def _world_size(folder: Path) -> int:
    if not (folder / "fsdp_config.json").is_file():
        raise CheckpointFormatError(
            f"the checkpoint is half-written: {folder} lacks fsdp_config.json. verl writes it after the shards. "
            "Export another step."
        )
    size = read_object(folder / "fsdp_config.json", _OTHER_STEP).get("world_size")
    if not isinstance(size, int) or size < 1:
        raise CheckpointFormatError(
            f"fsdp_config.json names no number of ranks: world_size={size!r} in {folder}. A positive integer is "
            "accepted. Export another step."
        )
    return size


def _sort(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """(factors of the adapter by module, other tensors under their names in the base model)."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(_PREFIX)
        factor = _FACTOR.fullmatch(plain)
        if factor:
            found.setdefault(factor[1], {})[factor[2]] = tensor
        elif "lora_" in plain or ".modules_to_save." in plain:
            raise unfit(folder, f"{name!r} is no lora_A or lora_B of a linear")
        else:
            others[plain.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    for module, parts in found.items():
        if len(parts) != 2:
            raise unfit(folder, f"{module!r} has lora_{next(iter(parts))} alone")
    return {module: (parts["A"], parts["B"]) for module, parts in sorted(found.items())}, others
