"""The generator on a small shape: what it writes is an NVFP4 checkpoint with a tokenizer, and a model reads it."""

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("verl")

import random_checkpoint as generator
from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import PackedWeight
from verl_qerl.verl_plugin.actor.packed_model import build_skeleton, load_packed
from verl_qerl.verl_plugin.config.base_options import BaseOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("random") / "tiny"
    assert generator.write_checkpoint("tiny", out, vocabulary=320) > 0
    return out


def test_a_model_reads_it(folder):
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config  # read by open_source
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    linears = build_skeleton(model, str(folder), ("lm_head",))
    load_packed(model, linears, str(folder), BaseOptions(), torch.bfloat16)
    assert len(linears) == 2 * 7
    assert 0.01 < next(iter(linears.values())).decode(torch.float32).std() < 0.05


def test_a_bf16_one_is_a_plain_model(tmp_path):
    generator.write_checkpoint("tiny", tmp_path / "dense", vocabulary=320, packed=False)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "dense"), "quantization_config")
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "dense")
    assert model.dtype == torch.bfloat16
    assert 0.01 < model.model.layers[1].mlp.up_proj.weight.std() < 0.03


def test_packed_weights_are_as_the_format_asks(folder):
    source = open_source(str(folder))
    assert source.layout != "bf16"
    packed = [item for _, item in packed_stream(source) if isinstance(item, PackedWeight)]
    assert len(packed) == 14
    for weight in packed:
        scale = weight.block_scale.float()
        assert scale.min() >= 2**-6
        assert scale.max() <= 448


def test_the_tokenizer_knows_a_chat(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "3 + 4?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).endswith("assistant\n")


def test_an_existing_directory_is_left_alone(folder):
    with pytest.raises(FileExistsError):
        generator.write_checkpoint("tiny", folder, vocabulary=320)
