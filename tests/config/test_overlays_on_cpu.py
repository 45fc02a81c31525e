"""`+rollout=nvfp4` and `+platform=cpu` change what their YAML says, the driver what follows from it; nothing else."""

import copy
import importlib.resources
from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import flat, run_config

from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.formats import NVFP4
from verl_qerl.verl_plugin.config import attention
from verl_qerl.verl_plugin.config.apply import prepare
from verl_qerl.verl_plugin.rollout.server import describe_checkpoint

ABSENT = "<absent>"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OURS = f"{ROLLOUT}.engine_kwargs.vllm"

# What `+rollout=nvfp4 +aqn.enabled=true` sets in a run with LoRA.
DIFFERENCE = {
    "qerl": {"base": {"format": "nvfp4"}},
    "aqn.enabled": True,
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.fsdp_config._target_": "verl_qerl.verl_plugin.config.base_options.QerlFSDPEngineConfig",
    f"{ACTOR}.fsdp_config.model_dtype": None,  # null: bf16 under an adapter, fp32 without
    "actor_rollout_ref.model.use_fused_kernels": True,
    f"{ACTOR}.use_fused_kernels": True,  # verl's own: they follow the model's
    "actor_rollout_ref.ref.strategy": "fsdp2",  # verl's own: it follows the actor's
    f"{ROLLOUT}.load_format": "safetensors",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 256,
}
# What the driver writes into that run.
WRITTEN = {
    f"{ACTOR}.fsdp_config.model_dtype": "bf16",
    f"{ACTOR}.fsdp_config.qerl": {
        "format": "nvfp4",
        "scale": None,
        "ignore": ["lm_head"],
        "train_norms": False,
        "shard": False,
        "share": False,
        "has_adapter": True,
        "run": {
            "rollout.gpu_memory_utilization": 0.5,
            "rollout.tensor_model_parallel_size": 2,
            "rollout.free_cache_engine": True,
            "actor.use_dynamic_bsz": False,
            "actor.ppo_max_token_len_per_gpu": 16384,
            "actor.ppo_micro_batch_size_per_gpu": 1,
            "data.max_prompt_length": 512,
            "data.max_response_length": 512,
        },
    },
    f"{ROLLOUT}.custom": {"qerl": {"base": "nvfp4"}},
    OURS: {
        "load_format": "verl_qerl_nvfp4",
        "quantization": "verl_qerl_nvfp4",
        "worker_extension_cls": "verl_qerl.verl_plugin.weight_sync.worker_extension.WorkerExtension",
        "model_loader_extra_config": {"scale": None, "share_base": False, "ignore": ["lm_head"]},
        "additional_config": {
            "verl_qerl": {
                "train_norms": False,
                "aqn": asdict(AQNConfig(enabled=True)),
            }
        },
    },
}


def composed(*overrides):
    return run_config("actor_rollout_ref.model.lora_rank=32", *overrides)


def prepared(*overrides):
    config = composed(*overrides)
    with patch.object(attention, "has_flash_attn", return_value=True):  # else the driver names another attention too
        prepare(config)
    return config


def differing(one, other):
    """Dotted keys with another value in `other`."""
    return {key for key, value in other.items() if one.get(key, ABSENT) != value}


def check_difference(before, after, expected):
    named = set()
    for key in differing(flat(before), flat(after)):
        nodes = [name for name in expected if key == name or key.startswith(f"{name}.")]
        assert len(nodes) == 1, f"{key} differs, which no line names"
        named |= set(nodes)
    assert named == set(expected)
    for name, value in expected.items():
        found = OmegaConf.select(after, name)
        found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        assert found == value, name
    return flat(before).keys() - flat(after).keys()


def test_the_difference_is_what_the_yaml_says():
    assert not check_difference(composed(), composed("+rollout=nvfp4", "+aqn.enabled=true"), DIFFERENCE)


def test_the_driver_writes_the_rest_once():
    options = ("+rollout=nvfp4", "+aqn.enabled=true")
    config = prepared(*options)
    gone = check_difference(composed(*options), config, WRITTEN)
    assert gone == {OURS, f"{ROLLOUT}.custom"} & gone  # empty in verl's, filled in ours
    again = copy.deepcopy(config)
    prepare(again)
    assert again == config


def write_model(folder):
    (folder / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return str(folder)


def test_both_sides_quantize_and_share_alike(tmp_path):
    options = (
        "+qerl.base.scale=minmax",
        "+qerl.base.ignore=[a,b]",
        "+qerl.base.share=true",
    )
    config = prepared("+rollout=nvfp4", "actor_rollout_ref.rollout.tensor_model_parallel_size=1", *options)
    kwargs = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    assert kwargs["model_loader_extra_config"] == {"scale": "minmax", "share_base": True, "ignore": ["a", "b"]}
    describe_checkpoint(kwargs, write_model(tmp_path))
    assert kwargs["hf_overrides"] == {"quantization_config": NVFP4().config(["a", "b"])}


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4"])
def test_the_other_formats_differ_from_nvfp4_in_their_name_only(form):
    nvfp4, other = flat(prepared("+rollout=nvfp4")), flat(prepared(f"+rollout={form}"))
    names = {"qerl.base.format", f"{ACTOR}.fsdp_config.qerl.format", f"{ROLLOUT}.custom.qerl.base"}
    kinds = {f"{OURS}.load_format", f"{OURS}.quantization"}
    assert differing(nvfp4, other) == names | kinds
    assert {other[name] for name in names} == {form}
    assert {other[name] for name in kinds} == {f"verl_qerl_{form}"}


@pytest.mark.parametrize("rollout", [(), ("+rollout=nvfp4",)], ids=["bf16", "nvfp4"])
def test_options_of_aqn_always_compose(rollout):
    config = composed(*rollout, "+aqn.enabled=true", "+aqn.sigma_start=2e-2", "+aqn.num_stages=5")
    assert config.aqn == {"enabled": True, "sigma_start": 2e-2, "num_stages": 5}


def test_the_command_line_wins():
    before = ("actor_rollout_ref.rollout.load_format=auto", "+rollout=nvfp4")
    for order in (before, before[::-1]):
        assert composed(*order).actor_rollout_ref.rollout.load_format == "auto"


def test_the_head_gives_log_probs_unless_it_trains_or_the_user_says_otherwise():
    option = "actor_rollout_ref.model.use_fused_kernels"
    assert OmegaConf.select(composed("+rollout=nvfp4"), option) is True
    assert OmegaConf.select(composed("+rollout=int8", "actor_rollout_ref.model.lora_rank=0"), option) is False
    assert OmegaConf.select(composed("+rollout=nvfp4", f"{option}=False"), option) is False
    assert OmegaConf.select(composed(), option) is False


def test_the_platform_composes_in_both_orders():
    options = ("+rollout=nvfp4", "+platform=cpu")
    one, other = (flat(prepared(*order, "+aqn.enabled=true")) for order in (options, options[::-1]))
    # Both name a load format that is not dummy, and a size of the transfer buffer: the later one stays.
    buffer = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    assert differing(one, other) == {f"{ROLLOUT}.load_format", buffer}
    assert (one[f"{ROLLOUT}.load_format"], other[f"{ROLLOUT}.load_format"]) == ("auto", "safetensors")
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
    config = prepared()
    assert config == composed()
    assert config.actor_rollout_ref.actor.fsdp_config._target_ == "verl.workers.config.FSDPEngineConfig"
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}
    assert "aqn" not in config
    assert "qerl" not in OmegaConf.to_yaml(config)


def test_every_yaml_goes_to_the_root():
    for group in ("rollout", "platform"):
        for path in importlib.resources.files("verl_qerl.config").joinpath(group).iterdir():
            assert path.read_text().startswith("# @package _global_\n"), path.name
