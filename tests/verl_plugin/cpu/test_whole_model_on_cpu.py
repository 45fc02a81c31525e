import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from verl.utils.config import validate_config

from verl_qerl.verl_plugin.cpu.whole_model import check_sync

RUN = ("actor_rollout_ref.model.path=model", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
RUN += ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm")
ADAPTER = "actor_rollout_ref.model.lora_rank=8"


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*RUN, *overrides])


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        ((), "lora_rank=0"),
        (("+aqn.enabled=true",), "lora_rank=0"),
        ((ADAPTER, "actor_rollout_ref.model.lora.merge=True"), "lora.merge=True"),
        (("actor_rollout_ref.model.lora.rank=8",), "lora_rank=0"),
        (("actor_rollout_ref.model.lora_adapter_path=adapter",), "lora_rank=0"),
    ],
    ids=["stock", "noise", "merged", "rank-of-the-node", "path-alone"],
)
def test_whole_models_in_bf16_are_refused_before_ray_starts(overrides, option):
    config = composed("+platform=cpu", *overrides)
    with pytest.raises(ValueError, match=rf"^model\.{option} with a bf16 rollout does not go together with trainer"):
        validate_config(config=config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize(
    "overrides",
    [
        ("+platform=cpu", ADAPTER),
        ("+platform=cpu", "+rollout=int8"),
        ("+platform=cpu", "+rollout=nvfp4", ADAPTER),
        ("+platform=cpu", "actor_rollout_ref.rollout.name=sglang"),
        (),
    ],
    ids=["adapter", "int8", "nvfp4", "other-engine", "gpu"],
)
def test_everything_else_is_left_alone(overrides):
    check_sync(composed(*overrides))
