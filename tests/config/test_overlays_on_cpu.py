"""`+rollout=nvfp4` and `+platform=cpu` change what their YAML says and nothing else."""

import importlib.resources

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_qerl.nvfp4.checkpoint import DEFAULT_IGNORE, quantization_config

RUN = (
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.model.lora_rank=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
)
ABSENT = "<absent>"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OURS = f"{ROLLOUT}.engine_kwargs.vllm"

# What `+rollout=nvfp4 +aqn.enabled=true` sets in a run with LoRA; None where the value is a whole node of ours.
DIFFERENCE = {
    "aqn.enabled": True,
    "actor_rollout_ref.model.use_fused_kernels": True,
    f"{ACTOR}.use_fused_kernels": True,  # verl's own: it follows the model's
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.fsdp_config._target_": "verl_qerl.verl_plugin.config.QerlFSDPEngineConfig",
    f"{ACTOR}.fsdp_config.model_dtype": "bf16",
    f"{ACTOR}.fsdp_config.qerl": None,
    "actor_rollout_ref.ref.strategy": "fsdp2",  # verl's own: it follows the actor's
    f"{ROLLOUT}.load_format": "safetensors",
    f"{ROLLOUT}.custom": {"qerl": {"base": "nvfp4"}},
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 256,
    f"{OURS}.load_format": "verl_qerl_nvfp4",
    f"{OURS}.quantization": "verl_qerl_nvfp4",
    f"{OURS}.worker_extension_cls": "verl_qerl.verl_plugin.worker_extension.WorkerExtension",
    f"{OURS}.model_loader_extra_config": {"scale": "minmax", "ignore": ["lm_head"]},
    f"{OURS}.hf_overrides": {"quantization_config": quantization_config()},
}


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*RUN, *overrides])


def flat(node, prefix=""):
    """Dotted key -> resolved value."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    items = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items()]
    return {key: value for path, child in items for key, value in flat(child, path).items()}


def differing(one, other):
    """Dotted keys with another value in `other`."""
    return {key for key, value in other.items() if one.get(key, ABSENT) != value}


def test_the_difference_is_what_the_yaml_says():
    stock, ours = composed(), composed("+rollout=nvfp4", "+aqn.enabled=true")
    named = set()
    for key in differing(flat(stock), flat(ours)):
        nodes = [name for name in DIFFERENCE if key == name or key.startswith(f"{name}.")]
        assert len(nodes) == 1, f"{key} differs, which no line of DIFFERENCE names"
        named |= set(nodes)
    assert named == set(DIFFERENCE)
    for name, value in DIFFERENCE.items():
        found = OmegaConf.select(ours, name)
        found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        assert value is None or found == value, name
    gone = flat(stock).keys() - flat(ours).keys()
    assert gone == {OURS}  # empty in verl's, filled in ours


def test_the_base_agrees_with_the_rest_of_the_run():
    config = composed("+rollout=nvfp4", "+aqn.enabled=true", "+aqn.seed=3", "++actor_rollout_ref.model.lora.rank=16")
    assert OmegaConf.to_container(config.actor_rollout_ref.actor.fsdp_config.qerl, resolve=True) == {
        "scale": "minmax",
        "ignore": list(DEFAULT_IGNORE),
        "agrees_with": {
            "rollout.name": "vllm",
            "rollout.load_format": "safetensors",
            "rollout.quantization": None,
            "actor.strategy": "fsdp2",
            "model.lora_rank": 32,
            "model.lora.rank": 16,
            "model.lora.merge": False,
            "model.lora_adapter_path": None,
            "trainer.use_v1": True,
            "trainer.v1.trainer_mode": "sync",
            "aqn": {"enabled": True, "seed": 3},
            "rollout.gpu_memory_utilization": 0.5,
            "rollout.tensor_model_parallel_size": 2,
            "rollout.free_cache_engine": True,
            "actor.use_dynamic_bsz": False,
            "actor.ppo_max_token_len_per_gpu": 16384,
            "actor.ppo_micro_batch_size_per_gpu": 1,
            "data.max_prompt_length": 512,
            "data.max_response_length": 512,
        },
    }


def test_both_sides_quantize_alike():
    options = (
        "actor_rollout_ref.actor.fsdp_config.qerl.scale=mse",
        "actor_rollout_ref.actor.fsdp_config.qerl.ignore=[a,b]",
    )
    config = composed("+rollout=nvfp4", *options)
    kwargs = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    assert kwargs["model_loader_extra_config"] == {"scale": "mse", "ignore": ["a", "b"]}
    assert kwargs["hf_overrides"]["quantization_config"] == quantization_config(["a", "b"])


@pytest.mark.parametrize("rollout", [(), ("+rollout=nvfp4",)], ids=["bf16", "nvfp4"])
def test_options_of_aqn_always_compose(rollout):
    config = composed(*rollout, "+aqn.enabled=true", "+aqn.sigma_start=2e-2", "+aqn.num_stages=5")
    assert config.aqn == {"enabled": True, "sigma_start": 2e-2, "num_stages": 5}


def test_the_command_line_wins():
    before = ("actor_rollout_ref.rollout.load_format=auto", "+rollout=nvfp4")
    for order in (before, before[::-1]):
        assert composed(*order).actor_rollout_ref.rollout.load_format == "auto"


def test_the_platform_composes_in_both_orders():
    options = ("+rollout=nvfp4", "+platform=cpu")
    one, other = (flat(composed(*order, "+aqn.enabled=true")) for order in (options, options[::-1]))
    # Both name a load format that is not dummy, and a size of the transfer buffer: the later one stays.
    buffer = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    seen = f"{ACTOR}.fsdp_config.qerl.agrees_with.rollout.load_format"
    assert differing(one, other) == {f"{ROLLOUT}.load_format", seen, buffer}
    assert (one[seen], other[seen]) == ("auto", "safetensors")
    assert (one[buffer], other[buffer]) == (64, 256)
    for config in (one, other):
        assert config[f"{OURS}.load_format"] == "verl_qerl_nvfp4"
        assert config[f"{OURS}.enable_sleep_mode"] is False
        assert config["ray_kwargs.ray_init.num_gpus"] == config["trainer.n_gpus_per_node"]
        assert (config["trainer.device"], config[f"{ACTOR}.strategy"]) == ("cpu", "fsdp2")


def test_the_platform_alone_keeps_the_stock_engine():
    config = composed("+platform=cpu")
    assert config.actor_rollout_ref.actor.fsdp_config._target_ == "verl.workers.config.FSDPEngineConfig"
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"enable_sleep_mode": False}


def test_a_stock_run_is_untouched():
    config = composed()
    assert config.actor_rollout_ref.actor.fsdp_config._target_ == "verl.workers.config.FSDPEngineConfig"
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}
    assert "aqn" not in config
    assert "qerl" not in OmegaConf.to_yaml(config)


def test_every_yaml_goes_to_the_root():
    for group in ("rollout", "platform"):
        for path in importlib.resources.files("verl_qerl.config").joinpath(group).iterdir():
            assert path.read_text().startswith("# @package _global_\n"), path.name
