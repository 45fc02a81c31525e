"""verl's own saving and loading of a step with our trainer around it; workers and data loader are stood for."""

import builtins
import contextlib
import itertools
import logging
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
from omegaconf import OmegaConf
from qerl_testing import load_beside
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.trainer.checkpoints import TRACKER, WholeCheckpoints, check_step, check_tracker

featured = load_beside(__file__, "featured")
pytestmark = pytest.mark.usefixtures("bare_trainers")
NUM_BATCHES = 5


def config_of(qerl, **options):
    """Of a run whose base is packed, or is not."""
    return OmegaConf.create({"qerl": qerl, "actor_rollout_ref": {"actor": {}}, **options})


Trainer = featured.trainer_of(WholeCheckpoints, base=PPOTrainerSync)


def trainer(run, guarded=True, **options):
    """A trainer without workers, in step 0."""
    settings = {"default_local_dir": str(run), "default_hdfs_dir": None, "resume_mode": "auto"}
    settings |= {"resume_from_path": None, "del_local_ckpt_after_load": False, "v1": {"trainer_mode": "sync"}} | options
    made = Trainer(
        config_of({"base": {"format": "nvfp4"}} if guarded else None, trainer=settings, critic={"enable": False})
    )
    made.global_steps, made.use_critic, made.trainer_mode = 0, False, "sync"
    made.checkpoint_callback = SimpleNamespace(on_save=lambda **kwargs: None)
    loaded = made.loaded = {}

    def save_actor(path, remote, step, max_ckpt_to_keep):
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "shards"), "w") as file:
            file.write(str(step))

    made.actor_rollout_wg = SimpleNamespace(
        save_checkpoint=save_actor,
        load_checkpoint=lambda local_path, **kwargs: loaded.update(actor=Path(local_path, "shards").read_text()),
    )
    made.train_dataloader = SimpleNamespace(
        state_dict=lambda: {"batches": made.global_steps * NUM_BATCHES},
        load_state_dict=lambda state: loaded.update(batches=state["batches"]),
    )
    return made


def save(run, step, **options):
    made = trainer(run, **options)
    made.global_steps = step
    made._save_checkpoint()


def resume(run, **options):
    """(step, what was loaded)."""
    made = trainer(run, **options)
    made._load_checkpoint()
    return made.global_steps, made.loaded


def expected(step):
    return step, {"actor": str(step), "batches": step * NUM_BATCHES}


def save_and_die(run, step, moment):
    """Save in a child that is killed at a moment; whether it was. Moments are around and inside each write."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    moments, real_open, real_save = itertools.count(1), builtins.open, torch.save

    def tick():
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_open(file, mode="r", *args, **kwargs):
        opened = real_open(file, mode, *args, **kwargs)
        if "w" in mode:
            tick()  # the file is empty
        return opened

    def dying_save(content, file):
        tick()
        real_save(content, file)
        whole = os.path.getsize(file)
        os.truncate(file, whole // 2)
        tick()
        real_save(content, file)
        tick()

    builtins.open, torch.save = dying_open, dying_save
    save(run, step)
    os._exit(0)


def test_killed_at_any_moment_a_run_goes_on_from_a_whole_step(tmp_path):
    found = []
    for moment in itertools.count(1):
        run = tmp_path / str(moment)
        save(run, 1)
        if not save_and_die(run, 2, moment):
            break
        if not (run / TRACKER).read_text():
            found.append("mended")
        step, loaded = resume(run)
        assert (step, loaded) == expected(step)
        found.append(step)
        save(run, 2)
        assert resume(run) == expected(2)
    assert found == [1, 1, 1, 1, "mended", 2]
    assert resume(run) == expected(2)


def test_what_a_killed_run_left_is_not_taken_for_the_new_step(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "global_step_2" / "transfer_queue").mkdir()
    assert save_and_die(tmp_path, 2, 1)  # in the shards
    assert sorted(path.name for path in (tmp_path / "global_step_2").iterdir()) == ["actor"]


def test_a_run_without_checkpoint_starts_anew(tmp_path):
    assert resume(tmp_path / "absent") == (0, {})
    save_and_die(tmp_path, 1, 3)
    assert (tmp_path / "global_step_1").exists()
    assert resume(tmp_path) == (0, {})
    (tmp_path / TRACKER).write_text("junk")
    assert resume(tmp_path, resume_mode="disable") == (0, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two", "^the tracker names no step: .* holds 'two'"),
        ("-1", "^the tracker names no step: "),
        (b"\xff2", "^the tracker names no step: .* holds '\ufffd2'"),
        ("7", "^the step to resume from is not there: .*global_step_7"),
        ("2", r"^the checkpoint is half-written: .*global_step_2 has no whole data\.pt"),
    ],
)
def test_a_tracker_that_misleads_is_refused(tmp_path, text, message):
    save(tmp_path, 1)
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / TRACKER).write_bytes(text if isinstance(text, bytes) else text.encode())
    made = trainer(tmp_path)
    with pytest.raises(CheckpointFormatError, match=message):
        made._load_checkpoint()
    assert made.loaded == {}


def test_an_empty_tracker_is_written_again_from_the_newest_whole_step(tmp_path, caplog):
    for step in (2, 9, 10, 11):
        save(tmp_path, step)
    os.truncate(tmp_path / "global_step_11" / "data.pt", 200)
    os.truncate(tmp_path / TRACKER, 0)
    with caplog.at_level(logging.WARNING):
        check_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "10"
    assert "was empty; the newest whole step is 10" in caplog.text
    shutil.rmtree(tmp_path / "global_step_2")
    for step in (9, 10):
        (tmp_path / f"global_step_{step}" / "data.pt").unlink()
    os.truncate(tmp_path / TRACKER, 0)
    with pytest.raises(CheckpointFormatError, match=r"^the tracker is empty and no step is whole: "):
        check_tracker(tmp_path)


def test_a_step_that_is_named_must_be_whole(tmp_path):
    save(tmp_path, 3)
    step = tmp_path / "global_step_3"
    named = {"resume_mode": "resume_path", "resume_from_path": str(step)}
    assert resume(tmp_path, **named) == expected(3)
    os.truncate(step / "data.pt", (step / "data.pt").stat().st_size - 10)
    with pytest.raises(CheckpointFormatError, match=r"^the checkpoint is half-written: .* has no whole data\.pt"):
        resume(tmp_path, **named)
    shutil.rmtree(step)
    with pytest.raises(CheckpointFormatError, match=r"^the step to resume from is not there: "):
        resume(tmp_path, **named)


@pytest.mark.parametrize("rest", [None, "", "global_step_3/", "global_step_3/actor", "global_step_"])
def test_a_path_that_names_no_step_is_refused(tmp_path, rest):
    save(tmp_path, 3)
    path = None if rest is None else f"{tmp_path}/{rest}"
    with pytest.raises(CheckpointFormatError) as caught:
        resume(tmp_path, resume_mode="resume_path", resume_from_path=path)
    assert str(caught.value).startswith(f"trainer.resume_from_path={path} names no step. A folder global_step_N is")


@pytest.mark.parametrize("dies", [True, False])
def test_a_step_of_an_async_run_is_whole_with_its_queue(tmp_path, monkeypatch, dies):
    def save_queue(path, metadata):
        if dies:
            raise KeyboardInterrupt
        os.makedirs(path)

    monkeypatch.setattr(trainer_base.tq, "save_checkpoint", save_queue)
    made = trainer(tmp_path, v1={"trainer_mode": "colocate_async"})
    made.trainer_mode, made.global_steps = "colocate_async", 3
    with pytest.raises(KeyboardInterrupt) if dies else contextlib.nullcontext():
        made._save_checkpoint()
    step = tmp_path / "global_step_3"
    if dies:
        with pytest.raises(CheckpointFormatError, match=r"^the checkpoint is half-written: .* whole transfer_queue"):
            check_step(step)
    else:
        check_step(step)
        assert sorted(path.name for path in step.iterdir()) == ["actor", "data.pt", "transfer_queue"]
    save(tmp_path, 3)  # again, in `sync`
    check_step(step)
    assert sorted(path.name for path in step.iterdir()) == ["actor", "data.pt"]


def test_a_step_of_sync_resumes_in_an_async_run(tmp_path):
    save(tmp_path, 3)
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_3")}
    assert resume(tmp_path, v1={"trainer_mode": "colocate_async"}, **named) == expected(3)


def test_a_stock_run_is_left_alone(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "global_step_1" / "data.pt").unlink()
    assert resume(tmp_path, guarded=False) == (1, {"actor": "1"})
    (tmp_path / TRACKER).write_text("7")
    assert resume(tmp_path, guarded=False) == (0, {})
