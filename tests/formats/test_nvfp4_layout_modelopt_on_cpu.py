import json

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.checkpoints.writer import ShardedWriter, quantized_specs, write_tensors
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import DEFAULT_FORMAT, NVFP4, nvfp4_layout
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.ignore import ignored_modules

MODULE = "model.layers.0.mlp.down_proj"


def test_modelopt_names_and_convention():
    weight = random_packed_weight(32, 64)
    tensors = named_tensors(MODULE, weight, "modelopt")
    assert list(tensors) == [f"{MODULE}.weight", f"{MODULE}.weight_scale", f"{MODULE}.weight_scale_2"]
    scale = tensors[f"{MODULE}.weight_scale_2"]
    # A multiplier, where compressed-tensors stores the divisor.
    assert (scale.shape, scale.item()) == ((), weight.global_decode_scale.item())
    assert scale.item() * named_tensors(MODULE, weight)[f"{MODULE}.weight_global_scale"].item() == 1


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_both_layouts_are_read_back_to_the_same_bits(tmp_path, layout):
    weight = random_packed_weight(32, 64)
    write_tensors(tmp_path / "dense.safetensors", {f"{MODULE}.weight": torch.zeros(32, 64, dtype=torch.bfloat16)})
    (tmp_path / "dense.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    specs = quantized_specs(open_source(tmp_path).specs, [MODULE], DEFAULT_FORMAT, layout)
    (tmp_path / "model.safetensors").unlink()
    with ShardedWriter(tmp_path, specs, 10**9) as writer:
        for name, tensor in named_tensors(MODULE, weight, layout).items():
            writer.add(name, tensor)
    make = nvfp4_layout.modelopt_config if layout == "modelopt" else NVFP4().config
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": make(["lm_head"])}))
    source = open_source(tmp_path)
    assert source.layout == layout
    ((name, found),) = packed_stream(source)
    assert (name, weight_digest(found)) == (MODULE, weight_digest(weight))


def test_vllm_takes_the_configuration_for_4_bit_weights_and_bf16_activations():
    modelopt = pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    for config in (nvfp4_layout.modelopt_config(["lm_head"]), nvfp4_layout.modelopt_legacy_config(["lm_head"])):
        hf_config = {"quant_method": "modelopt", **config}
        assert modelopt.ModelOptNvFp4Config.override_quantization_method(hf_config, None) == "modelopt_fp4"
        found = modelopt.ModelOptNvFp4Config.from_config(config)
        assert found.LinearMethodCls is modelopt.ModelOptNvFp4W4A16LinearMethod
        assert (found.group_size, found.exclude_modules) == (16, ["lm_head"])


@pytest.fixture
def older(tmp_path):
    """A directory of ModelOpt before it wrote into config.json, as its quantization has it."""

    def write(quantization: dict):
        weight = random_packed_weight(32, 64)
        write_tensors(tmp_path / "model.safetensors", named_tensors(MODULE, weight, "modelopt"))
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
        return tmp_path, weight

    return write


def test_an_older_directory_of_modelopt_is_read(older):
    path, weight = older({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "a"]})
    source = open_source(path)
    assert (source.layout, source.config["model_type"]) == ("modelopt", "qwen2")
    assert ignored_modules(source.config) == ("lm_head", "a")
    ((name, found),) = packed_stream(source)
    assert (name, weight_digest(found)) == (MODULE, weight_digest(weight))


def test_an_older_directory_in_another_format_is_refused(older):
    path, _ = older({"quant_algo": "FP8", "exclude_modules": ["lm_head"]})
    with pytest.raises(CheckpointFormatError, match=r"is not read: quant_method='modelopt', quant_algo='FP8'\."):
        open_source(path)


def test_an_older_file_of_another_kind_is_refused(older):
    path, _ = older(3)
    with pytest.raises(
        CheckpointFormatError, match=r"does not say how it is quantized: quantization_config=3\. An obj"
    ):
        open_source(path)


def test_config_json_goes_before_the_older_file(older):
    path, _ = older({"quant_algo": "FP8"})
    (path / "config.json").write_text(json.dumps({"quantization_config": nvfp4_layout.modelopt_config(["lm_head"])}))
    assert open_source(path).layout == "modelopt"
