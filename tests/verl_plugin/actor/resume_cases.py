"""Started by test_resume_on_cpu.py, on one rank or more: saves checkpoints, damages and loads them.

python resume_cases.py <folder of models> <folder for checkpoints and findings> <case> ...
"""

import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from engine_cases import CASES, OUT, adapters, build, optimizer_state, step
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_qerl.checkpoints.record import RECORD, BaseRecord, read_record
from verl_qerl.cli.export.fsdp_checkpoint import open_checkpoint
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.actor.resume import file_name

CUT = 100  # bytes


def saved(name, ranks):
    """Folder of a checkpoint that `save` made on that many ranks."""
    return Path(OUT) / f"saved-{ranks}" / name


def state(engine):
    """Everything that a checkpoint of the engine holds, tensors whole."""
    return {
        "adapters": adapters(engine),
        "optimizer": optimizer_state(engine),
        "scheduler": engine.lr_scheduler.state_dict(),
        "rng": BaseCheckpointManager.get_rng_state()["cpu"],
    }


def same(engine, kept):
    """Whether an engine holds what `state` once returned, bit for bit; generators besides, which every test moves."""
    held = state(engine)
    return all(equal(held[part], kept[part]) for part in kept if part != "rng")


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def load(engine, folder):
    """The error of loading, or None; one that is not ours begins with its kind."""
    try:
        engine.load_checkpoint(str(folder), del_local_after_load=False)
    except CheckpointFormatError as error:
        return str(error)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def save():
    """Checkpoints for the cases; returns what the engines held."""
    found = {}
    for name in ("lora", "full", "partial"):
        engine = build("bf16", lora_only=name != "full")
        if name == "partial":
            engine.checkpoint_manager.checkpoint_save_contents = ["model", "extra"]
        for _ in range(2):
            step(engine)
            engine.lr_scheduler_step()
        torch.manual_seed(100 + dist.get_rank())
        engine.save_checkpoint(str(saved(name, dist.get_world_size())), global_step=2)
        found[name] = state(engine)
    return found


def restored(ranks, **settings):
    """What fresh engines hold after loading what so many ranks saved, and the norm of their next gradient."""
    found = {}
    for name in ("lora", "full"):
        engine = build("bf16", settings=settings)
        error = load(engine, saved(name, ranks))
        found[name] = {"error": error, "state": state(engine), "norm": None if error else step(engine)}
    return found


def without_files(folder):
    record = read_record(folder)
    assert record is not None
    BaseRecord(record.base, record.scale, record.ignore, record.digests, record.adapter).write(folder)


def cut(part, rank):
    def damage(folder):
        file = folder / file_name(part, 2, rank)
        os.truncate(file, file.stat().st_size - CUT)

    return damage


def of_rank_0(part):
    return lambda folder: shutil.copy(folder / file_name(part, 2, 0), folder / file_name(part, 2, 1))


DAMAGES = {
    "another rank's model": of_rank_0("model"),
    "another rank's optimizer": of_rank_0("optimizer"),
    "no folder": shutil.rmtree,
    "no record": lambda folder: (folder / RECORD).unlink(),
    "no files in the record": without_files,
    "a cut record": lambda folder: os.truncate(folder / RECORD, CUT),
    "a cut model": cut("model", 1),
    "a cut optimizer": cut("optimizer", 1),
    "no extra state": lambda folder: (folder / file_name("extra", 2, 0)).unlink(),
}
OTHERS = {
    "scale": {"qerl": {"scale": "minmax"}},
    "ignore": {"qerl": {"ignore": ["lm_head", "re:.*mlp"]}},
    "rank": {"lora_rank": 4},
    "alpha": {"lora_alpha": 32},
    "targets": {"target_modules": ["q_proj", "v_proj"]},
}


def refused():
    """Name -> (error, whether the engine stayed what it was)."""
    found = {}
    engine = build("bf16")
    for name, damage in DAMAGES.items():
        folder = Path(OUT) / name.replace(" ", "_")
        if dist.get_rank() == 0:
            damage(shutil.copytree(saved("lora", 2), folder))
        dist.barrier()
        before = state(engine)
        found[name] = (load(engine, folder), equal(before, state(engine)))
    found["partial"] = (load(engine, saved("partial", 2)), True)
    for name, options in OTHERS.items():
        engine = build("bf16", **options)
        before = state(engine)
        found[name] = (load(engine, saved("lora", 2)), equal(before, state(engine)))
    return found


def in_parts():
    """What is told where parts of a checkpoint are left out, and what an engine then holds."""
    engine, told = build("bf16"), []
    logger = logging.getLogger("verl_qerl")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())
    for contents in (["model", "extra"], "hf_model", []):
        engine.checkpoint_manager.checkpoint_load_contents = contents
        assert load(engine, saved("partial", 1)) is None
    return {"told": told, "state": state(engine)}


class Killer:
    """Kills the process at the n-th moment of a save: around and inside each file of torch, and at Python's own."""

    def __init__(self, folder, moment):
        self.folder, self.left, self.num = str(folder), moment, 0
        self.torch_save = torch.save
        torch.save = self.save
        sys.addaudithook(self.hook)

    def tick(self):
        self.num += 1
        if self.num == self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, content, file, **kwargs):
        self.tick()
        self.torch_save(content, file, **kwargs)
        if self.num + 1 == self.left:
            os.truncate(file, os.path.getsize(file) // 2)
        self.tick()  # when half of the file is there
        self.tick()

    def hook(self, event, args):
        changes = event in ("os.remove", "os.rename") or (event == "open" and "w" in str(args[1]))
        if changes and str(args[0]).startswith(self.folder):
            self.tick()


def save_and_die(engine, folder, moment):
    """Overwrite the checkpoint in `folder` in a child that is killed; the number of moments if it was not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The threads of gloo did not come along; these are what collectives of one rank do.
        dist.barrier = lambda *args, **kwargs: None
        dist.all_gather_object = lambda found, mine, *args, **kwargs: found.__setitem__(0, mine)
        killer = Killer(folder, moment)
        engine.save_checkpoint(str(folder), global_step=2)
        os.write(writer, str(killer.num).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    told = os.read(reader, 16)
    os.close(reader)
    assert os.WIFSIGNALED(status) or told, status
    return int(told) if told else None


def killed():
    """A checkpoint is written over an older one and killed at every moment; what a load then makes of it."""
    first = Path(OUT) / "killed"
    engine = build("bf16")
    step(engine)
    engine.save_checkpoint(str(first / "old"), global_step=2)
    old = state(engine)
    step(engine)
    new = state(engine)
    num = save_and_die(engine, shutil.copytree(first / "old", first / "0"), 0)
    for moment in range(1, num + 1):
        assert save_and_die(engine, shutil.copytree(first / "old", first / str(moment)), moment) is None
    outcomes, exported = [], []
    reader = build("bf16")
    for moment in [*range(1, num + 1), 0]:
        error = load(reader, first / str(moment))
        held = [name for name, kept in (("old", old), ("new", new)) if same(reader, kept)]
        outcomes.append(error.partition(":")[0] if error else " and ".join(held))
        exported.append(told_by_export(first / str(moment)))
    return {"num": num, "outcomes": outcomes, "exported": exported}


def told_by_export(folder):
    try:
        return "whole" if open_checkpoint(folder).record else "of another engine"
    except CheckpointFormatError as error:
        return str(error).partition(":")[0]


RUNS = {
    "save": save,
    "restored from 1": lambda: restored(1),
    "restored from 2": lambda: restored(2),
    "a copy on each rank": lambda: restored(2, fsdp_size=1),
    "refused": refused,
    "in parts": in_parts,
    "killed": killed,
}

if __name__ == "__main__":
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    store = f"file://{OUT}/store-{world_size}-{len(CASES)}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    for case in CASES:
        torch.save(RUNS[case](), f"{OUT}/{case}-{world_size}-{rank}.pt")
    dist.destroy_process_group()
