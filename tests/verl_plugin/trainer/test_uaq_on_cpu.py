"""UAQ as an option of verl's command: what is refused on the driver, and what reaches the workers."""

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import run_config
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_qerl.verl_plugin import asks_for_qerl
from verl_qerl.verl_plugin.config.apply import prepare
from verl_qerl.verl_plugin.config.base_options import QerlFSDPEngineConfig
from verl_qerl.vllm_plugin.options import rollout_options

UAQ = "+uaq.enabled=true"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
NO_EFFECT = r": UAQ acts on weights that are trained and quantized again, .* Accepted is {}\."
BAD = {
    ("actor_rollout_ref.model.lora_rank=8",): r"^actor_rollout_ref\.model\.lora_rank=8 does not go together with \+uaq",
    ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8"): NO_EFFECT.format("0"),
    ("actor_rollout_ref.model.lora_adapter_path=a",): NO_EFFECT.format("null"),
    ("actor_rollout_ref.actor.fsdp_config._target_=my.Config",): r": another one has no place for the scale",
    ("actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",): r"Accepted is a list without hf_model",
    ("actor_rollout_ref.model.use_liger=True",): r": its norms cannot be checked",
    (
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
    ): r"model_dtype=bf16 does not go together with \+uaq\.scale=1\.5: the scale .*, or \+uaq\.scale=2\.",
    ("trainer.use_v1=False",): r"^trainer\.use_v1=False does not go together",
    ("+uaq.s=2",): r"^unknown option uaq\.s=2",
}


@pytest.fixture
def trainer_config(bare_trainers):
    """What a trainer of verl's registry makes of a configuration."""
    return lambda *overrides: get_trainer_cls("sync")(run_config(*overrides)).config


@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[0].partition(".")[2])
def test_what_cannot_be_is_refused_on_the_driver_and_by_the_trainer(trainer_config, overrides):
    with pytest.raises(ValueError, match=BAD[overrides]):
        prepare(run_config(UAQ, *overrides))
    with pytest.raises(ValueError, match=BAD[overrides]):
        trainer_config(UAQ, *overrides)


def test_verl_asks_before_ray_starts():
    with pytest.raises(ValueError, match="does not go together with"):
        validate_config(
            config=run_config(UAQ, "actor_rollout_ref.model.use_liger=True"),
            use_reference_policy=False,
            use_critic=False,
        )
    with pytest.raises(ValueError, match=r"^uaq\.scale=2 has no effect while UAQ is off"):
        validate_config(config=run_config("+uaq.scale=2"), use_reference_policy=False, use_critic=False)
    assert asks_for_qerl([UAQ])


def test_options_compose_from_the_command_line():
    bf16 = "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"
    for overrides in (
        (),
        (UAQ,),
        (UAQ, "+uaq.scale=2", bf16),
        ("+uaq.enabled=false", "actor_rollout_ref.model.lora_rank=8"),
    ):
        prepare(run_config(*overrides))


def test_the_scale_reaches_engine_and_noise(trainer_config):
    config = trainer_config(UAQ, "+uaq.scale=2", "+aqn.enabled=true", "actor_rollout_ref.actor.strategy=fsdp2")
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert (type(engine), engine.uaq_scale, engine.strategy) == (QerlFSDPEngineConfig, 2.0, "fsdp2")
    assert config.actor_rollout_ref.ref.fsdp_config._target_ == "verl.workers.config.FSDPEngineConfig"
    additional = OmegaConf.to_container(OmegaConf.select(config, f"{VLLM}.additional_config"))
    vllm_config = type("VllmConfig", (), {"additional_config": additional})
    assert rollout_options(vllm_config).uaq_scale == 2.0
    assert rollout_options(vllm_config).aqn.enabled


@pytest.mark.parametrize(
    "overrides", [(), ("+aqn.enabled=true",), ("+uaq.enabled=false",)], ids=["stock", "aqn", "off"]
)
def test_without_it_nothing_changes(trainer_config, overrides):
    config = trainer_config(*overrides)
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    assert fsdp._target_ == "verl.workers.config.FSDPEngineConfig"
    assert "uaq_scale" not in fsdp
    assert OmegaConf.select(config, f"{VLLM}.additional_config.verl_qerl.uaq_scale") is None
