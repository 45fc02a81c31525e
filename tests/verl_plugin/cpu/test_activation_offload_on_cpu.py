import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from verl.utils.config import validate_config

from verl_qerl.verl_plugin.cpu.activation_offload import check_offload

RUN = ("actor_rollout_ref.model.path=model", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
RUN += ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm")
OFFLOAD = "actor_rollout_ref.model.enable_activation_offload=True"


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*RUN, "actor_rollout_ref.model.lora_rank=8", *overrides])


def test_it_is_refused_before_ray_starts():
    config = composed("+platform=cpu", OFFLOAD)
    with pytest.raises(ValueError, match=r"^actor_rollout_ref\.model\.enable_activation_offload=True does not go toge"):
        validate_config(config=config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("overrides", [("+platform=cpu",), (OFFLOAD,)], ids=["off", "gpu"])
def test_everything_else_is_left_alone(overrides):
    check_offload(composed(*overrides))
