import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from verl_qerl.checkpoints.source import INDEX
from verl_qerl.checkpoints.writer import ShardedWriter, write_tensors
from verl_qerl.formats.tensor_spec import DTYPES, TensorSpec

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randint(0, 256, (3, 5), dtype=torch.uint8, generator=generator),
        "scale": torch.rand(3, 7, generator=generator).to(torch.float8_e4m3fn),
        "global": torch.rand(1, generator=generator),
        "weight": torch.rand(9, 11, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "view": torch.rand(8, 6, generator=generator).t(),
    }


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("limit", [1, 60, 250, 10**6])
def test_safetensors_reads_what_was_written_in_any_order(tmp_path: Path, limit: int) -> None:
    tensors = some_tensors()
    with ShardedWriter(tmp_path, specs_of(tensors), limit) as writer:
        for name in reversed(tensors):
            writer.add(name, tensors[name])
    found = loaded(tmp_path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float()), name


def test_files_keep_to_the_limit_and_the_index_names_them(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), i, dtype=torch.float32) for i in range(7)} | {"large": torch.ones(100)}
    with ShardedWriter(tmp_path, specs_of(tensors), max_shard_bytes=100) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]  # 2 + 2 + 2 + 1 + the large one
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 7 * 40 + 400}
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert {name for name, where in index["weight_map"].items() if where == file} == set(shard.keys())


def test_one_file_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    tensors = some_tensors()
    with ShardedWriter(tmp_path, specs_of(tensors), 10**6) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    tensors = some_tensors()
    with ShardedWriter(tmp_path, specs_of(tensors), 10**6) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    content = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert (8 + size) % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_threads_may_write_together(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((5000,), i) for i in range(64)}
    with ShardedWriter(tmp_path, specs_of(tensors), 300_000) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: writer.add(name, tensors[name]), tensors))
    found = loaded(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_has_not_come_is_named(tmp_path: Path) -> None:
    tensors = some_tensors()
    writer = ShardedWriter(tmp_path, specs_of(tensors), 10**6)
    for name in tensors.keys() - {"weight"}:
        writer.add(name, tensors[name])
    with pytest.raises(ValueError, match="1 tensors were not written, first 'weight'"):
        writer.__exit__(None, None, None)


def test_an_error_inside_is_not_replaced_by_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="inside"), ShardedWriter(tmp_path, specs_of(some_tensors()), 60):
        raise KeyError("inside")
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("other", torch.ones(1), "'other' is not expected"),
        ("global", torch.ones(1), "'global' is written already"),
        ("weight", torch.ones(9, 11), "is torch.float32"),
        ("weight", torch.ones(11, 9).bfloat16(), r"is torch.bfloat16 \(11, 9\)"),
    ],
)
def test_what_was_not_announced_is_refused(tmp_path: Path, name: str, tensor: torch.Tensor, told: str) -> None:
    writer = ShardedWriter(tmp_path, specs_of(some_tensors()), 10**6)
    writer.add("global", torch.ones(1))
    with pytest.raises(ValueError, match=told):
        writer.add(name, tensor)
    writer.__exit__(ValueError, ValueError(), None)


def test_a_write_that_stops_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux writes 2**31 - 4096 bytes at a time; an embedding may have more.
    import os

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: write(fd, data[:7], position))
    tensors = some_tensors()
    with ShardedWriter(tmp_path, specs_of(tensors), 10**6) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    found = loaded(tmp_path)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_of_a_few_tensors_has_the_mode_of_its_neighbours(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_tensors(tmp_path / "adapter.safetensors", some_tensors())
    finally:
        os.umask(before)
    assert (tmp_path / "adapter.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    found = loaded(tmp_path)
    for name, tensor in some_tensors().items():
        assert torch.equal(found[name].float(), tensor.float()), name
    with safe_open(tmp_path / "adapter.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as found:
        write_tensors(path, {"a": torch.ones(4)})
    assert (found.value.errno, found.value.filename) == (errno.ENOSPC, str(path))
