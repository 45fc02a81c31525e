"""How often the V1 trainers look for finished prompts is an option."""

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

sampler = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "sampler_kwargs": {}, "poll_interval": 0.5}
nodes = {"trainer": {"v1": {"sampler": sampler}}, "algorithm": {}, "data": {"train_batch_size": 4}}
trainer = PPOTrainerSync.__new__(PPOTrainerSync)
trainer.config, trainer.trainer_mode = OmegaConf.create(nodes), "sync"
found = trainer._build_replay_buffer().poll_interval
assert found == 0.5, f"trainer.v1.sampler.poll_interval=0.5 and the trainer looks every {found} s"
