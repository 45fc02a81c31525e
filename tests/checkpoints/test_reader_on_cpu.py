import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints import reader
from verl_qerl.checkpoints.reader import read_shard
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

CPU = torch.device("cpu")


def save_every_dtype(path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (7 * 24,), dtype=torch.uint8, generator=generator)
    tensors = {name: (raw & 1).view(dtype) if name == "BOOL" else raw.view(dtype) for name, dtype in DTYPES.items()}
    tensors = {name: tensor.view(7, -1).clone() for name, tensor in tensors.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "last": torch.arange(1000)}
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("num_buffers", [1, 2, 8])
def test_reads_what_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, num_buffers: int
) -> None:
    save_every_dtype(tmp_path / "m.safetensors")
    monkeypatch.setattr(reader, "_PIECE_BYTES", piece)
    monkeypatch.setattr(reader, "_NUM_BUFFERS", num_buffers)
    found = list(read_shard(tmp_path / "m.safetensors", CPU))
    expected = load_file(tmp_path / "m.safetensors")
    assert len(found) == len(expected)
    for name, tensor in found:  # the list is complete: no buffer is shared with a later tensor
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert as_bytes(tensor) == as_bytes(expected[name]), name


def test_a_buffer_is_not_filled_again_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i:02d}": torch.full((1000,), i) for i in range(30)}
    save_file(tensors, tmp_path / "m.safetensors")
    monkeypatch.setattr(reader, "_PIECE_BYTES", 8000)
    monkeypatch.setattr(reader, "_NUM_BUFFERS", 3)
    for _, buffer in reader._read_ahead(
        tmp_path / "m.safetensors", reader._pieces(*reader._read_header(tmp_path / "m.safetensors")), pinned=False
    ):
        before = buffer.clone()
        time.sleep(0.002)
        assert torch.equal(buffer, before)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    save_every_dtype(tmp_path / "m.safetensors")
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 10)
    with pytest.raises(CheckpointFormatError, match=r"a shard ends early: .*m\.safetensors within '"):
        list(read_shard(tmp_path / "m.safetensors", CPU))


def test_leaving_early_closes_the_file(tmp_path: Path) -> None:
    save_every_dtype(tmp_path / "m.safetensors")
    tensors = read_shard(tmp_path / "m.safetensors", CPU)
    next(tensors)
    tensors.close()
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert not any(str(tmp_path) in file for file in open_files)


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("BF16", (3, 5), 30), ("U8", (7,), 7), ("F32", (), 4), ("F8_E4M3", (0, 4), 0)]
)
def test_sizes(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert TensorSpec(dtype, shape).size_bytes == size
