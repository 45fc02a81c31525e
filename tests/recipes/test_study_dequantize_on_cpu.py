"""The bf16 copy of a quantized model: the numbers that the packed base stands for, loaded by transformers alone."""

import json

import pytest
import torch
from qerl_testing import random_qwen2
from transformers import AutoModelForCausalLM

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.reference import dequantize


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    random_qwen2(hidden_size=64, intermediate_size=128, num_hidden_layers=2).save_pretrained(folder)
    return folder


def test_the_copy_has_what_the_codes_stand_for(study, bf16, tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "copy"
    quantize_checkpoint(bf16, packed, device="cpu")
    study("dequantize").write(packed, out)
    copy = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(bf16).state_dict()
    assert copy.dtype == torch.bfloat16
    seen = 0
    for name, item in packed_stream(open_source(bf16)):  # as a run quantizes what it reads
        if isinstance(item, PackedWeight):
            found = copy.state_dict()[f"{name}.weight"]
            assert torch.equal(found.double(), dequantize(item, torch.float64))  # bf16 holds it exactly
            assert not torch.equal(found, before[f"{name}.weight"])
            seen += 1
        else:
            assert torch.equal(copy.state_dict()[name], item)
    assert seen == 14
    told = [json.loads((folder / "quantization_report.json").read_text())["model_digest"] for folder in (packed, out)]
    assert told[0] == told[1]


def test_a_model_that_is_not_quantized_is_refused(study, bf16, tmp_path):
    with pytest.raises(ValueError, match=r"not quantized: .* What `python -m verl_qerl quantize` wrote is accepted"):
        study("dequantize").write(bf16, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
