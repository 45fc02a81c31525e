import json
import logging
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("verl")

from peft import LoraConfig

from verl_qerl.formats import get_format
from verl_qerl.formats.base import named_tensors
from verl_qerl.planning.memory_plan import GIB, Settings
from verl_qerl.planning.model_shape import ModelShape
from verl_qerl.verl_plugin.actor import memory_check
from verl_qerl.verl_plugin.actor.memory_check import check_memory, settings_of

CONFIG = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064}
CONFIG |= {"num_attention_heads": 40, "num_key_value_heads": 8}
SHAPE = ModelShape.from_config(CONFIG)
Q, KV, HIDDEN, MLP = 5120, 1024, 5120, 27648
RUN = {
    "rollout.gpu_memory_utilization": 0.6,
    "rollout.tensor_model_parallel_size": 2,
    "rollout.free_cache_engine": True,
    "actor.use_dynamic_bsz": False,
    "actor.ppo_max_token_len_per_gpu": 16384,
    "actor.ppo_micro_batch_size_per_gpu": 2,
    "data.max_prompt_length": 320,
    "data.max_response_length": 2048,
}


@pytest.fixture
def engine(tmp_path):
    _store(tmp_path / "model", {})
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: CONFIG),
        lora_rank=32,
        lora_adapter_path=None,
        local_path=str(tmp_path / "model"),
        target_modules="all-linear",
        exclude_modules=None,
        use_shm=False,
        enable_gradient_checkpointing=True,
        use_fused_kernels=True,
    )
    config = SimpleNamespace(
        ulysses_sequence_parallel_size=1,
        param_offload=False,
        optimizer_offload=False,
        offload_policy=False,
        qerl=SimpleNamespace(shard=True, share=False, format="int8", ignore=("lm_head",)),
    )
    mesh = SimpleNamespace(ndim=1, get_group=lambda dim: SimpleNamespace(size=lambda: 4))
    return SimpleNamespace(model_config=model, engine_config=config, device_mesh=mesh, rank=0)


@pytest.fixture
def gpu(monkeypatch):
    cuda = SimpleNamespace(is_available=lambda: True, mem_get_info=lambda: (78 * GIB, 80 * GIB))
    monkeypatch.setattr(memory_check, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_settings_are_those_of_the_run(engine):
    sizes = {"rank": 32, "gpus": 4, "tokens": 2 * 2368, "utilization": 0.6, "tensor_parallel": 2}
    sizes["adapted_features"] = SHAPE.adapted_features
    expected = Settings(**sizes, shard_base=True, format="int8", ignore=("lm_head",))
    assert settings_of(engine, RUN, SHAPE) == expected
    assert settings_of(engine, RUN | {"actor.use_dynamic_bsz": True}, SHAPE).tokens == 16384
    assert settings_of(engine, {}, SHAPE).tokens == 0


@pytest.mark.parametrize(
    ("where", "name", "value", "expected"),
    [
        ("model_config", "enable_gradient_checkpointing", False, {"checkpointing": False}),
        ("model_config", "use_fused_kernels", False, {"whole_logits": True}),
        ("engine_config.qerl", "shard", False, {"shard_base": False}),
        ("engine_config.qerl", "share", True, {"share_base": True}),
        ("engine_config", "param_offload", True, {"param_offload": True}),
        ("engine_config", "optimizer_offload", True, {"optimizer_offload": True}),
        ("engine_config", "offload_policy", True, {"offload_policy": True}),
    ],
)
def test_every_switch_of_the_run_is_one_of_the_settings(engine, where, name, value, expected):
    before = settings_of(engine, RUN, SHAPE)
    setattr(attrgetter(where)(engine), name, value)
    assert settings_of(engine, RUN, SHAPE) == replace(before, **expected) != before


def test_a_rollout_that_never_sleeps_is_one_of_the_settings(engine):
    assert settings_of(engine, RUN, SHAPE).sleeps
    assert not settings_of(engine, RUN | {"rollout.free_cache_engine": False}, SHAPE).sleeps


@pytest.mark.parametrize(
    ("targets", "excluded", "features"),
    [
        (["q_proj", "v_proj"], None, 64 * (2 * HIDDEN + Q + KV)),
        ("all-linear", [f"{name}_proj" for name in ("gate", "up", "down")], 64 * (4 * HIDDEN + 2 * Q + 2 * KV)),
        (r".*layers\.[01]\..*down_proj", None, 2 * (HIDDEN + MLP)),
        (["k_proj", "lm_head"], r".*layers\.0\..*", 63 * (HIDDEN + KV)),
        (None, None, 0),
    ],
    ids=["names", "excluded", "regex", "excluded-regex", "default"],
)
def test_adapters_are_counted_where_they_are_put(engine, targets, excluded, features):
    engine.model_config.target_modules, engine.model_config.exclude_modules = targets, excluded
    assert settings_of(engine, RUN, SHAPE).adapted_features == features


def test_an_adapter_on_a_fused_linear_is_counted_once(engine):
    engine.model_config.target_modules, engine.model_config.exclude_modules = ["qkv_proj"], None
    shape = ModelShape.from_config(CONFIG | {"model_type": "phi3"})
    assert settings_of(engine, RUN, shape).adapted_features == 64 * (HIDDEN + Q + 2 * KV)


def test_an_adapter_that_is_read_brings_its_own_rank_and_targets(engine, tmp_path):
    LoraConfig(r=4, target_modules=["o_proj"]).save_pretrained(tmp_path)
    engine.model_config.lora_adapter_path = str(tmp_path)
    found = settings_of(engine, RUN, SHAPE)
    assert (found.rank, found.adapted_features) == (4, 64 * (Q + HIDDEN))


def test_linears_left_in_bf16_are_those_of_the_run_or_of_its_packed_model(engine, gpu, caplog):
    def logged():
        with caplog.at_level(logging.WARNING):
            check_memory(engine, RUN)
        return caplog.records.pop().message

    assert "linears in bf16" not in logged()
    engine.engine_config.qerl.ignore = ("lm_head", "re:.*mlp.*")
    assert settings_of(engine, RUN, SHAPE).ignore == ("lm_head", "re:.*mlp.*")
    assert f"linears in bf16: {2 * 64 * 3 * HIDDEN * MLP / 4 / GIB:.2f}" in logged()  # of four GPUs
    form = get_format("int8")
    _store(engine.model_config.local_path, {"quantization_config": form.config(("re:.*down_proj",))})
    assert settings_of(engine, RUN, SHAPE).ignore == ("re:.*down_proj",)
    assert f"linears in bf16: {2 * 64 * HIDDEN * MLP / 4 / GIB:.2f}" in logged()


def _store(folder, config):
    """A checkpoint of one layer, its down_proj in bf16, the other linear packed where `config` says so."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1} | config))
    weight, up = torch.ones(32, 32, dtype=torch.bfloat16), "model.layers.0.mlp.up_proj"
    packed = named_tensors(up, get_format("int8").quantize(weight)) if config else {f"{up}.weight": weight}
    save_file(packed | {"model.layers.0.mlp.down_proj.weight": weight.clone()}, folder / "model.safetensors")


def test_a_run_with_few_large_adapters_fits(engine, gpu):
    engine.model_config.lora_rank = 256
    engine.device_mesh.get_group = lambda dim: SimpleNamespace(size=lambda: 1)
    engine.engine_config.qerl.format = "nvfp4"
    with pytest.raises(ValueError, match=r"^too little GPU memory"):
        check_memory(engine, RUN)
    engine.model_config.target_modules = ["q_proj", "v_proj"]
    check_memory(engine, RUN)


def test_ranks_that_share_sequences_hold_a_part_of_the_tokens(engine):
    engine.engine_config.ulysses_sequence_parallel_size = 3
    assert settings_of(engine, RUN, SHAPE).tokens == 1579  # of 4,736, rounded up
    # verl fills a micro-batch with so many for each of them.
    assert settings_of(engine, RUN | {"actor.use_dynamic_bsz": True}, SHAPE).tokens == 16384


def test_a_run_that_fits_is_logged_with_its_numbers(engine, gpu, caplog):
    with caplog.at_level(logging.WARNING):
        check_memory(engine, RUN)
    (record,) = caplog.records
    assert "2.0 GiB taken by others now" in record.message
    assert "vLLM: 48.00" in record.message


def test_a_run_that_does_not_fit_is_refused(engine, gpu):
    with pytest.raises(ValueError, match=r"^too little GPU memory for the configuration: the rollout holds"):
        check_memory(engine, RUN | {"rollout.gpu_memory_utilization": 0.95})


def test_a_model_without_a_plan_runs(engine, gpu, caplog):
    engine.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
    with caplog.at_level(logging.WARNING):
        check_memory(engine, RUN)
    assert "no plan for this model" in caplog.records[0].message


def test_without_a_gpu_there_is_nothing_to_check(engine, monkeypatch):
    monkeypatch.setattr(memory_check.torch.cuda, "is_available", lambda: False)
    check_memory(engine, RUN | {"rollout.gpu_memory_utilization": 0.95})
