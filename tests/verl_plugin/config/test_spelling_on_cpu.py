"""Misspelled nodes, in the configuration that verl composes."""

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig

from verl_qerl.verl_plugin.config import spelling

QUANTIZED = ("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8")


@pytest.mark.parametrize(
    ("override", "node"),
    [
        ("+rolout=nvfp4", "+rollout"),
        ("+aqn_enabled=true", "+aqn.enabled"),
        ("+acr_max_ratio=2", "+acr.max_ratio"),
        ("+aqm.enabled=true", "+uaq or +aqn"),
        ("+aqm.sigma_start=0.1", "+aqn"),
        ("+qrel.gate.max_kl=0.1", "+qerl"),
        ("+uqa.scale=2", "+uaq"),
        ("+AQN.sigma_start=0.1", "+aqn"),
        ("+platfrom=cpu", "+platform"),
        ("+rollout.format=nvfp4", "+rollout=fp8 or +rollout=int8 or +rollout=mxfp4 or +rollout=nvfp4"),
    ],
)
def test_a_likely_typo_beside_an_option_of_ours_is_a_warning(validate, override, node):
    (message,) = validate("+qerl.gate.mismatch_sample=0", override, of=spelling)
    name = override.split("=")[0].split(".")[0]
    assert message == (
        f"{name} looks like a misspelled option of verl_qerl, which does not read it. If it is meant for verl_qerl,"
        f" stop the run and write {node}. If it is an option of your own, nothing is to be done: the run goes on."
    )


@pytest.mark.parametrize("override", ["+rolout=nvfp4", "+rollout.format=int8"])
def test_a_format_in_a_misspelled_node_is_a_warning_in_a_stock_run_too(validate, override):
    (message,) = validate(override, of=spelling)
    assert message.startswith(f"{override.split('=')[0].split('.')[0]} looks like a misspelled option of verl_qerl")
    lora = "actor_rollout_ref.model.lora_rank=8"
    assert validate("trainer.device=cpu", lora, override, of=spelling) == [message]


@pytest.mark.parametrize(
    "override",
    [
        "+agn.enabled=true",
        "+dqn.seed=0",
        "+my_platform=cpu",
        "+uar.scale=2",
        "+my.format=nvfp4",
        "+my=nvfp4",
        "+my=[1]",
    ],
)
def test_a_stock_run_is_not_looked_at(validate, override):
    assert validate(override, of=spelling) == []


@pytest.mark.parametrize("override", ["+aqs.speed=3", "+my_rollout=fast", "+acl=2"])
def test_what_is_the_users_own_is_not_mentioned(override, configuration, caplog):
    spelling.check_spelling(configuration(*QUANTIZED, "+aqn.enabled=true", override))
    assert caplog.messages == []


@pytest.mark.parametrize("formats", ["[nvfp4,int8]", "[int8, fp8]"])
def test_several_formats_are_refused(configuration, monkeypatch, formats):
    overrides = ["+qerl.gate.mismatch_sample=0", f"+rollout={formats}"]  # Hydra takes the last
    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = compose("ppo_trainer", overrides, return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", whole)
    with pytest.raises(ValueError, match=r"^\+rollout=\[\w+, ?\w+\] names several formats\. One is accepted"):
        spelling.check_spelling(configuration(*QUANTIZED))
    whole.hydra.overrides.task = list(QUANTIZED)
    spelling.check_spelling(configuration(*QUANTIZED))
