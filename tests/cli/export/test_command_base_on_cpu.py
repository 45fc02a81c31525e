"""Which base an export takes, and what it says of it."""

import json
import shutil

import pytest

pytest.importorskip("verl")

import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints.source import open_source
from verl_qerl.cli.export.command import export_checkpoint

CASE = "ours-nvfp4-lora"


def test_the_base_given_takes_the_place_of_the_one_named(trained, models, tmp_path):
    moved = shutil.copytree(models / "nvfp4", tmp_path / "moved")
    report = export_checkpoint(trained(CASE).actor, tmp_path / "out", "peft", str(moved))
    assert report["base"] == str(moved)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved)


def test_a_base_named_by_a_relative_path_is_found_from_everywhere(trained, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    export_checkpoint(trained(CASE).actor, tmp_path / "out", "peft", "nvfp4")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models / "nvfp4")


def test_a_base_with_scales_of_a_kv_cache_is_written_without_them(trained, models, tmp_path):
    base, file = tmp_path / "base", tmp_path / "base" / "kv.safetensors"
    shutil.copytree(models / "nvfp4", base)
    names = [f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale" for layer in range(2) for kind in "kv"]
    save_file({name: torch.ones(()) for name in names}, file)
    index = dict(open_source(models / "nvfp4").files) | dict.fromkeys(names, file.name)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    export_checkpoint(trained(CASE).actor, tmp_path / "out", "merged-bf16", str(base))
    assert not set(names) & set(open_source(tmp_path / "out").files)


def test_a_configuration_of_transformers_4_keeps_its_spelling(trained, models, tmp_path):
    base = shutil.copytree(models / "bf16", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config.pop("dtype")
    (base / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    export_checkpoint(trained("ours-bf16-full").actor, tmp_path / "out", "merged-bf16", str(base))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["torch_dtype"], "dtype" in found) == ("bfloat16", False)
