"""What vLLM is asked for; tests/cli/eval/test_eval_vllm_on_cpu.py starts engines with it."""

import json

import pytest

from verl_qerl.cli.quantize import quantize_checkpoint
from verl_qerl.testing import random_decoder
from verl_qerl.vllm_plugin.offline import EngineOptions, engine_options

EXTENSION = "verl_qerl.vllm_plugin.worker.NoiseWorkerExtension"


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    random_decoder("qwen2").save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cpu", ignore=["model.layers.0.self_attn.o_proj"])
    return folder


def test_without_a_format_everything_is_vllms(model_dirs):
    found = engine_options(EngineOptions(str(model_dirs / "bf16"), max_model_len=96, seed=3))
    assert found == {
        "model": str(model_dirs / "bf16"),
        "dtype": "bfloat16",
        "max_model_len": 96,
        "tensor_parallel_size": 1,
        "seed": 3,
    }


def test_a_bf16_model_is_quantized_as_the_options_say(model_dirs):
    options = EngineOptions(str(model_dirs / "bf16"), "nvfp4", "minmax", ("lm_head", "re:.*o_proj"), memory=0.5)
    found = engine_options(options)
    assert found["load_format"] == found["quantization"] == "verl_qerl_nvfp4"
    assert found["model_loader_extra_config"] == {"scale": "minmax", "ignore": ["lm_head", "re:.*o_proj"]}
    assert found["hf_overrides"]["quantization_config"]["ignore"] == ["lm_head", "re:.*o_proj"]
    assert (found["worker_extension_cls"], found["gpu_memory_utilization"]) == (EXTENSION, 0.5)


def test_a_packed_model_stays_as_it_is(model_dirs):
    found = engine_options(EngineOptions(str(model_dirs / "nvfp4"), "nvfp4", "minmax"))
    assert "model_loader_extra_config" not in found
    assert "model.layers.0.self_attn.o_proj" in found["hf_overrides"]["quantization_config"]["ignore"]
    with pytest.raises(ValueError, match="quantized in another format: nvfp4, and int8 is asked for"):
        engine_options(EngineOptions(str(model_dirs / "nvfp4"), "int8"))


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (4, 8), (32, 32), (33, 64)])
def test_the_rank_of_an_adapter_is_rounded_up(model_dirs, tmp_path, rank, taken):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    found = engine_options(EngineOptions(str(model_dirs / "bf16"), adapter=tmp_path))
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, taken)


@pytest.mark.parametrize("rank", [0, 1000, None])
def test_a_rank_that_vllm_does_not_take(model_dirs, tmp_path, rank):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    with pytest.raises(ValueError, match=f"the adapter's rank cannot be served: r={rank} in .* Merge the adapter"):
        engine_options(EngineOptions(str(model_dirs / "bf16"), adapter=tmp_path))
