"""Exports of adapters that were trained on an INT8 base; NVFP4: test_command_on_cpu.py."""

import json

import pytest

pytest.importorskip("verl")

import torch
from peft import PeftModel
from qerl_testing import TOKENS, log_probs
from transformers import AutoModelForCausalLM

from verl_qerl.checkpoints.record import read_record
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.export.command import export_checkpoint
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import INT8, PackedWeight
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.adapted_linear import fuse_adapters

each_case = pytest.mark.parametrize("case", ["int8-bf16-lora", "int8-int8-full"])


def base_model(found, models, dtype=torch.bfloat16):
    """The bf16 model with the weights of the base, dense."""
    model = AutoModelForCausalLM.from_pretrained(models / "bf16", dtype=dtype, attn_implementation="sdpa").eval()
    for name, item in packed_stream(open_source(found.base), INT8()):
        if isinstance(item, PackedWeight):
            model.get_submodule(name).weight.data = dequantize(item, dtype)
    return model


@each_case
def test_the_record_names_the_format(trained, case):
    record = read_record(trained(case).actor)
    assert (record.format, record.digests) == ("int8", trained(case).found["digests"])


@each_case
def test_the_adapter_in_peft_is_the_trainers_model_to_the_bit(trained, models, tmp_path, case):
    found = trained(case)
    export_checkpoint(found.actor, tmp_path / "peft", "peft", device="cpu")
    model = PeftModel.from_pretrained(base_model(found, models), tmp_path / "peft")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, found.found["adapter"][name].float())
            parameter.data = parameter.data.bfloat16()  # FSDP2 computes with bf16
    fuse_adapters(model)  # as the trainer adds them up
    assert torch.equal(log_probs(model, TOKENS), found.found["log_probs"])


@each_case
def test_the_merged_model_is_base_and_adapter(trained, models, tmp_path, case):
    found = trained(case)
    report = export_checkpoint(found.actor, tmp_path / "out", "merged-bf16", device="cpu")
    assert report["base_digest_checked"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, attn_implementation="sdpa")
    dense = base_model(found, models, torch.float32)
    adapter = {name.replace(".default.weight", ""): value for name, value in found.found["adapter"].items()}
    for module in ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
        A, B = (adapter[f"base_model.model.{module}.lora_{half}"].float() for half in "AB")
        expected = (dense.get_submodule(module).weight + 2 * B @ A).bfloat16()
        assert torch.allclose(merged.get_submodule(module).weight.float(), expected.float(), rtol=2**-7)
    # Two ways of rounding one function to bf16. Measured: 6e-3, where training changed 1 and more.
    difference = (log_probs(merged, TOKENS) - found.found["log_probs"]).abs().mean()
    assert difference < 2e-2
    assert (found.found["before"] - found.found["log_probs"]).abs().mean() > 20 * difference


@pytest.mark.parametrize("form", ["merged-nvfp4", "modelopt"])
def test_no_other_format_is_made_of_it(trained, tmp_path, refused, form):
    message = refused(
        "export", "--checkpoint", trained("int8-bf16-lora").actor, "--to", form, "--out", tmp_path / "a"
    ).splitlines()[-1]
    assert f"to={form}" in message
    assert "Accepted are peft and merged-bf16. Use --to merged-bf16, then `python -m verl_qerl quantize --" in message
    assert not list(tmp_path.iterdir())


def test_a_base_in_another_format_is_refused(trained, models, tmp_path):
    with pytest.raises(CheckpointFormatError, match="in another format: nvfp4, and int8 is asked for"):
        export_checkpoint(trained("int8-bf16-lora").actor, tmp_path / "a", "peft", str(models / "nvfp4"))
