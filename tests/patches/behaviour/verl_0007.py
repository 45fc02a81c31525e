"""A registered policy loss can refuse the configuration of a run in validate_config."""

from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.config import validate_config


class Picky:
    """Refuses everything."""

    def check_config(self, config):
        raise ValueError(f"refused: rollout.n={config.actor_rollout_ref.rollout.n}")


register_policy_loss("picky")(Picky())
overrides = [
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.policy_loss.loss_mode=picky",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=3",
    "data.train_files=hdfs://elsewhere.jsonl",  # verl names files that are not here
    "data.val_files=hdfs://elsewhere.jsonl",
    "+aqn.enabled=false",  # the shim looks at runs with an option of ours alone
]
with initialize_config_module("verl.trainer.config", version_base=None):
    run = compose("ppo_trainer", overrides=overrides)
try:
    validate_config(config=run, use_reference_policy=False, use_critic=False)
    said = "nothing"
except ValueError as error:
    said = str(error)
assert said == "refused: rollout.n=3", f"validate_config told {said}"

run.actor_rollout_ref.actor.policy_loss.loss_mode = "vanilla"
validate_config(config=run, use_reference_policy=False, use_critic=False)
