"""The reader for a GPU gives what the memory map for a CPU gives."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints import reader
from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import PackedWeight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("piece", [1000, 32 << 20])
def test_gpu_and_cpu_stream_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(reader, "_PIECE_BYTES", piece)
    names = [f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(3) for kind in "qkvo"]
    tensors = {name: torch.randn(96, 64).bfloat16() for name in names}
    tensors |= {"model.embed_tokens.weight": torch.randn(256, 64).half(), "model.norm.weight": torch.ones(64)}
    (tmp_path / "config.json").write_text(json.dumps({}))
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    expected = dict(packed_stream(source))
    found = dict(packed_stream(source, device="cuda"))
    assert set(found) == set(expected)
    for name, item in expected.items():
        if isinstance(item, PackedWeight):
            assert found[name].codes.is_cuda
            assert weight_digest(found[name]) == weight_digest(item)
        else:
            assert found[name].is_cuda
            assert torch.equal(found[name].cpu(), item)
