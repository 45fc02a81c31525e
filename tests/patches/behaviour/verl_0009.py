"""The trainer replaces latest_checkpointed_iteration.txt in one step: whoever has it open still reads the last one."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer


def nothing(*args: object, **kwargs: object) -> None:
    """Stands for workers."""


folder = tempfile.TemporaryDirectory()
tracker = Path(folder.name) / "latest_checkpointed_iteration.txt"
tracker.write_text("1")
trainer = SimpleNamespace(
    config=OmegaConf.create(
        {"trainer": {"default_local_dir": folder.name, "default_hdfs_dir": None}, "actor_rollout_ref": {"actor": {}}}
    ),
    global_steps=2,
    actor_rollout_wg=SimpleNamespace(save_checkpoint=nothing),
    use_critic=False,
    train_dataloader=SimpleNamespace(state_dict=dict),
    trainer_mode="sync",
    checkpoint_callback=SimpleNamespace(on_save=nothing),
)
with tracker.open() as previous:
    PPOTrainer._save_checkpoint(trainer)
    told = previous.read()
assert tracker.read_text() == "2"
folder.cleanup()
assert told == "1", f"the last tracker became {told!r} before there was a next"
