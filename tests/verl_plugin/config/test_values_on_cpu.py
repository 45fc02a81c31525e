"""Values of verl's own options, in the configuration that verl composes."""

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import run_config
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_qerl.verl_plugin.config.apply import prepare

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OURS = ("actor_rollout_ref.model.lora_rank=8", "+rollout=nvfp4")
TOKENS = "-1 for all tokens, or a whole number of them"
COUNT, SHARE, TEXT = r"a whole number above 0\.", r"a number above 0, up to 1\.", r"\. That is text; of a variable"


@pytest.mark.parametrize(
    ("override", "accepted"),
    [
        (f"{ROLLOUT}.gpu_memory_utilization=abc", SHARE),
        (f"{ROLLOUT}.gpu_memory_utilization=1.5", SHARE),
        (f"{ROLLOUT}.gpu_memory_utilization=0", SHARE),
        (f"{ROLLOUT}.gpu_memory_utilization=-1", SHARE),
        (f"{ROLLOUT}.gpu_memory_utilization='0.5'", SHARE[:-2] + TEXT),
        (f"{ROLLOUT}.temperature=0", r"a number above 0, up to 2\."),
        (f"{ROLLOUT}.temperature=2.5", r"a number above 0, up to 2\."),
        (f"{ROLLOUT}.val_kwargs.temperature=-1", r"a number from 0 to 2\."),
        (f"{ROLLOUT}.val_kwargs.top_p=1.5", SHARE),
        (f"{ROLLOUT}.top_k=1.5", TOKENS),
        (f"{ROLLOUT}.val_kwargs.top_k=-2", TOKENS),
        (f"{ROLLOUT}.n=2.5", COUNT),
        ("data.train_batch_size=0", COUNT),
        ("data.train_batch_size=null", COUNT),
        ("data.train_max_samples=null", r"a number\."),
        ("data.val_max_samples=null", r"a number\."),
        ("trainer.total_training_steps=-1", COUNT),
        ("trainer.total_epochs=0", COUNT),
        ("trainer.nnodes=null", COUNT),
        ("trainer.resume_mode=null", "auto, disable, "),
        ("trainer.v1.trainer_mode=null", r"sync, colocate_async, separate_async\."),
        (f"{ROLLOUT}.n='4'", COUNT[:-2] + TEXT),
        (f"{ROLLOUT}.agent.num_workers=0", COUNT),
        (f"{ROLLOUT}.max_num_batched_tokens=0", COUNT),
        (f"{ROLLOUT}.temperature=inf", r"a number above 0, up to 2\."),
        (f"{ACTOR}.optim.lr=nan", r"a number\."),
        (f"{ACTOR}.optim.betas=[0.9]", r"two numbers in \[0, 1\)"),
        (f"{ACTOR}.optim.betas=[0.9,1]", r"two numbers in \[0, 1\)"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf15", r"bf16, fp16, fp32\."),
        (f"{ACTOR}.kl_loss_type=k4", r"kl, .*low_var_kl, .*k3\+\."),
        ("algorithm.kl_penalty=k4", r"kl, .*low_var_kl, .*k3\+\."),
        ("algorithm.kl_ctrl.type=fix", r"fixed, adaptive\."),
        ("trainer.save_freq=ten", r"a number\."),
        (f"{ACTOR}.optim.lr=[1e-5]", r"a number\."),
        ("algorithm.adv_estimator=remax", r"gae, grpo, .*rloo"),
        ("algorithm.adv_estimator=optimal_token_baseline", r"gae, grpo, .*rloo"),
        ("trainer.resume_mode=atuo", r"auto, disable, resume_path\."),
        ("trainer.logger=[console,fil]", "a list of wandb, .* console, .* file, "),
        ("trainer.logger=5", "a list of wandb, .* console, .* file, "),
        (f"{ACTOR}.use_kl_loss=no", r"true, false\."),
        ("trainer.val_before_train='false'", "true, false" + TEXT),
        (f"{ACTOR}.checkpoint.save_contents=[modle]", "a list of model, optimizer, extra, hf_model"),
        (f"{ACTOR}.checkpoint.save_contents=modle", "a list of model, optimizer, extra, hf_model"),
    ],
)
def test_a_value_of_no_use_gives_its_sentence(override, accepted):
    name = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"^{name}=.* is no value of this option\. Accepted: {accepted}"):
        prepare(run_config(*OURS, override))


@pytest.mark.parametrize(
    "override",
    ["custom_reward_function.path=reward.py", "reward_model.reward_manager=dapo", "sandbox_fusion.url=http://here"],
)
def test_an_option_of_rewards_where_older_verl_had_it_is_refused(override):
    config = run_config(*OURS, override)
    assert get_custom_reward_fn(config) is None  # verl takes it and trains on another reward
    with pytest.raises(ValueError, match=rf"^{override.partition('=')[0]}='.*' has no effect: .* as in reward\.custom"):
        prepare(config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("rollout_is=tokens",), r"rollout_is='tokens', .*Invalid rollout_is: tokens\. Must be one of"),
        (("rollout_is=token", "rollout_is_threshold=two"), r"Invalid rollout_is_threshold 'two'"),
        (("rollout_rs=token_k1",), r"rollout_rs='token_k1' .*rollout_rs_threshold must be explicitly provided"),
        (("rollout_rs=token", "rollout_rs_threshold=2"), r"Invalid rollout_rs option: token\. Must be one of"),
    ],
    ids=str,
)
def test_a_correction_that_verl_refuses_in_the_first_step_is_refused_at_once(options, says):
    with pytest.raises(ValueError, match=rf"^algorithm\.rollout_correction with .*{says}.* Correct the options\.$"):
        prepare(run_config(*OURS, *(f"algorithm.rollout_correction.{option}" for option in options)))


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("trainer", None, "balance_batch"),
        (ROLLOUT, None, "name"),
        (f"{ACTOR}.optim", None, "optimizer"),
        (f"{ACTOR}.policy_loss", "acr", "loss_mode"),
        ("actor_rollout_ref.model.override_config", 3, "NAME"),
        ("data.custom_cls", None, "path"),
        ("reward.reward_manager", "${data.prompt_key}", "source"),
        (f"{ROLLOUT}.custom", [], "NAME"),
        (f"{ROLLOUT}.custom", 5, "NAME"),  # it was lost
    ],
)
def test_a_value_where_verl_has_a_group_gives_its_sentence(name, value, option):
    config = run_config(*OURS)
    OmegaConf.update(config, name, value, force_add=True)
    said = r"is no group of options, .* Accepted are options such as `{}\.{}=\.\.\.`\. Leave it out"
    with pytest.raises(ValueError, match=rf"^{name}=\S+ {said.format(name, option)}"):
        prepare(config)


def test_a_stock_run_on_a_cpu_may_have_it():
    custom = f"+{ROLLOUT}.custom=[]"
    config = run_config("actor_rollout_ref.model.lora_rank=8", "+platform=cpu", custom)
    before = OmegaConf.to_container(config)
    prepare(config)
    assert OmegaConf.to_container(config) == before


def test_a_group_of_a_critic_is_asked_for_where_there_is_one():
    options = (*OURS, "critic.optim=null", "critic.ppo_micro_batch_size_per_gpu=1")
    prepare(run_config(*options, "algorithm.adv_estimator=grpo"))
    with pytest.raises(ValueError, match=r"^critic\.optim=null is no group of options"):
        prepare(run_config(*options, "algorithm.adv_estimator=gae"))


def test_a_group_that_verl_can_do_without_may_be_null():
    names = (f"{ACTOR}.profiler", "algorithm.rollout_correction", "actor_rollout_ref.model.override_config")
    prepare(run_config(*OURS, *(f"{name}=null" for name in names)))


def test_values_that_verl_takes_stay():
    prepare(
        run_config(
            *OURS,
            "trainer.total_training_steps=null",
            f"{ACTOR}.grad_clip=inf",
            f"{ROLLOUT}.temperature=2",
            f"{ROLLOUT}.top_k=0",
            f"{ROLLOUT}.val_kwargs.temperature=0",
            f"{ACTOR}.kl_loss_type=low_var_kl+",
            f"{ACTOR}.fsdp_config.model_dtype=32",
            f"{ROLLOUT}.max_num_batched_tokens=null",
            "trainer.logger=console",
            "trainer.save_freq=${trainer.test_freq}",
            "trainer.val_before_train=${oc.decode:'false'}",
            f"{ACTOR}.checkpoint.save_contents=model",
            f"{ACTOR}.checkpoint.load_contents=[]",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=${data.cut}",
            "+data.cut=0.5_2.0",
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
            "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0,0.1'",
            f"{ROLLOUT}.n=${{data.n}}",
            "reward_model.enable=False",
            "+data.n=4",
        )
    )
