import json

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.writer import ShardedWriter
from verl_qerl.cli.model_dir import copy_other_files, device_name, pick_device, store
from verl_qerl.formats.tensor_spec import TensorSpec


def test_what_describes_the_source_alone_is_not_copied(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "additional_chat_templates").mkdir(parents=True)
    out.mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    kept = {"tokenizer.json", "generation_config.json", "config.json"}
    left = {"model.safetensors", "model.safetensors.index.json", "hf_quant_config.json", "quantization_report.json"}
    for name in kept | left:
        (source / name).write_text("{}")
    copy_other_files(source, out)
    assert {path.name for path in out.iterdir()} == kept | {"additional_chat_templates"}
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "x"


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_stored_tensors_have_the_names_of_the_layout(tmp_path, layout):
    weight, norm = random_packed_weight(16, 32), torch.ones(4)
    global_scale = {"compressed-tensors": ("weight_packed", "weight_global_scale", (1,))}.get(
        layout, ("weight", "weight_scale_2", ())
    )
    specs = {
        f"a.{global_scale[0]}": TensorSpec("U8", (16, 16)),
        "a.weight_scale": TensorSpec("F8_E4M3", (16, 2)),
        f"a.{global_scale[1]}": TensorSpec("F32", global_scale[2]),
        "norm": TensorSpec("F32", (4,)),
    }
    with ShardedWriter(tmp_path, specs, 10**6) as writer:
        assert store(writer, iter([("a", weight), ("norm", norm)]), layout) == {"a": weight_digest(weight)}
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert open_source(tmp_path).specs == specs


def test_a_failure_in_a_thread_reaches_the_caller(tmp_path):
    specs = {"norm": TensorSpec("F32", (4,))}
    with pytest.raises(ValueError, match="not expected"), ShardedWriter(tmp_path, specs, 10**6) as writer:
        store(writer, iter([("other", torch.ones(4))]))


def test_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == device_name("cpu") == "cpu"
    with pytest.raises(ValueError, match="torch finds no GPU: device='cuda'"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (pick_device("auto"), pick_device("cpu")) == ("cuda", "cpu")
