import torch

from verl_qerl.checkpoints import manifest
from verl_qerl.checkpoints.manifest import NAME, Manifest, checksum, read_checksums, with_manifest


def test_a_checksum_by_hand():
    words = torch.tensor([5, -2, 7], dtype=torch.int32)
    assert int(checksum(words)) == 5 * 3 + -2 * 5 + 7 * 7
    odd = torch.tensor([5, 2, 7], dtype=torch.uint8)  # no whole words: bytes
    assert int(checksum(odd)) == 5 * 3 + 2 * 5 + 7 * 7


def test_it_sees_every_bit_and_every_place(monkeypatch):
    monkeypatch.setattr(manifest, "_CHUNK", 7)
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = int(checksum(weight))
    for i in range(0, weight.numel(), 11):
        for bit in range(16):
            changed = weight.clone()
            changed.view(torch.int16).view(-1)[i] ^= 1 << bit if bit < 15 else -32768
            assert int(checksum(changed)) != before
    swapped = weight.clone()
    swapped[[0, 9]] = swapped[[9, 0]]
    assert int(checksum(swapped)) != before


def test_chunks_and_views_change_nothing(monkeypatch):
    weight = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    whole = int(checksum(weight))
    bucket = torch.zeros(5 + weight.numel(), dtype=torch.uint8)
    view = bucket[5:].view(torch.float8_e4m3fn).view(33, 64)
    view.view(torch.uint8).copy_(weight.view(torch.uint8))
    monkeypatch.setattr(manifest, "_CHUNK", 100)
    assert int(checksum(weight)) == whole
    assert int(checksum(weight.t().contiguous().t())) == whole
    assert int(checksum(view)) == whole


def test_the_manifest_ends_the_stream_and_survives_it():
    sent = {"a": torch.ones(4, dtype=torch.int8), "b": torch.ones(2, 2)}
    *tensors, (name, last) = with_manifest(sent.items(), 32)
    assert tensors == list(sent.items())
    assert (name, last.dtype) == (NAME, torch.uint8)
    found = Manifest.from_tensor(last)
    assert (found.num_bytes, found.num_bytes_bf16) == (4 + 16, 32)
    assert found.checksums == read_checksums({key: checksum(tensor) for key, tensor in sent.items()})
