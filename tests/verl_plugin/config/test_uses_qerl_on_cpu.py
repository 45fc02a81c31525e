"""Which runs set an option of ours, in the configuration that verl composes and on a command line."""

import pytest

pytest.importorskip("verl")

from verl_qerl.verl_plugin.config.uses_qerl import asks_for_qerl, names_a_format, uses_qerl

ADDITIONAL = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize(
    "override",
    [
        "+aqn.enabled=true",
        "+acr.max_ratio=2",
        "+uaq.enabled=true",
        "+qerl.gate.mismatch_sample=2",
        "actor_rollout_ref.actor.policy_loss.loss_mode=acr",
        "+rollout=int8",
        "+actor_rollout_ref.actor.fsdp_config.qerl.scale=minmax",  # where apply.py writes
        "+qerl.rollout.lora=stock",
        f"+{ADDITIONAL}.verl_qerl.lora=stock",
        f'+{ADDITIONAL}=\'{{"verl_qerl": {{"lora": "stock"}}}}\'',
        f"+{VLLM}.worker_extension_cls=verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
        f"+{VLLM}.load_format=verl_qerl_nvfp4",
        f"+{VLLM}.quantization=verl_qerl_nvfp4",
        "actor_rollout_ref.rollout.load_format=verl_qerl_nvfp4",
        f"+{MODEL}.override_config.attn_implementation=verl_qerl_varlen",
        "+critic.model.override_config.attn_implementation=verl_qerl_varlen",
    ],
)
def test_an_option_of_ours_makes_a_run_ours(configuration, override):
    assert uses_qerl(configuration(override))


@pytest.mark.parametrize(
    "override",
    [
        f"{MODEL}.lora_rank=8",
        "+agn.enabled=true",
        "+platform=cpu",
        f"+{ADDITIONAL}.other=1",
        f"+{ADDITIONAL}.other=folder/verl_qerl/file",
        f"+{ADDITIONAL}=[1]",  # whose error is vLLM's
        f"+{ADDITIONAL}='{{bad'",
        f"+{VLLM}.worker_extension_cls=mine.Extension",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        "trainer.experiment_name=verl_qerl_baseline",
        "+actor_rollout_ref.rollout.custom.other=1",
    ],
)
def test_other_runs_are_stock(configuration, override):
    assert not uses_qerl(configuration(override))


def test_what_cannot_be_resolved_is_left_to_its_reader(configuration):
    assert not names_a_format(configuration("+mine=${nothing.of.this.name}", "+other=???"))


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["+rollout=nvfp4"], True),
        (["+rollout=int8"], True),
        (["trainer.nnodes=1", "+aqn.enabled=true"], True),
        (["++aqn.seed=1"], True),
        (["aqn.seed=1"], True),
        (["+uaq.enabled=true"], True),
        (["+aqn={enabled: true}"], True),
        (["+acr.max_ratio=4"], True),
        (["+qerl.gate.max_initial_kl=0.1"], True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=acr"], True),
        (['actor_rollout_ref.actor.policy_loss.loss_mode="acr"'], True),
        (["++actor_rollout_ref.actor.policy_loss.loss_mode='acr'"], True),
        (["+rollout='nvfp4'"], True),
        (["+qerl.rollout.lora=stock"], True),
        ([f"+{ADDITIONAL}={{verl_qerl: {{lora: stock}}}}"], True),
        ([f"+{ADDITIONAL}.other=1"], False),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"], False),
        (["actor_rollout_ref.rollout.name=vllm", "+aqnx=1", "rollout=nvfp4x"], False),
        ([], False),
    ],
)
def test_asks_for_qerl(arguments, asks):
    assert asks_for_qerl(arguments) == asks
