"""What a sync sends: a checksum of every tensor, so that the rollout can tell whether it holds the actor's weights.

The manifest is the last tensor of the stream. Its checksums are integer sums, taken where the tensors are and the same
on every device: SHA-256, as of the packed base, would take a 7B model to the CPU at every sync.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch

NAME = "verl_qerl.manifest"
_CHUNK = 1 << 22  # elements; bounds the temporaries


@dataclass(frozen=True)
class Manifest:
    """What one weight sync sent.

    Attributes:
        checksums: tensor name -> checksum, of everything that was sent.
        num_bytes: That was sent, without the manifest.
        num_bytes_bf16: What the same model takes in bf16.
    """

    checksums: Mapping[str, int] = field(repr=False)
    num_bytes: int
    num_bytes_bf16: int

    def to_tensor(self) -> torch.Tensor:
        """[n] uint8, JSON."""
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "Manifest":
        """The inverse of `to_tensor`."""
        return cls(**json.loads(bytes(tensor.cpu().tolist())))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """[] int64 on the tensor's device: the sum of 4-byte words, the i-th times 2 i + 1, modulo 2**64.

    It changes with any single word, and when two different words change places.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 4 else data  # a view of words must start at one
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factor = 3
    for chunk in words.split(_CHUNK):
        end = factor + 2 * chunk.numel()
        total = total + torch.arange(factor, end, 2, device=tensor.device).mul_(chunk).sum()
        factor = end
    return total


def with_manifest(
    tensors: Iterable[tuple[str, torch.Tensor]], num_bytes_bf16: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, and at their end `NAME` with the manifest of what went by."""
    sums: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        sums[name] = checksum(tensor)
        num_bytes += tensor.nbytes
        yield name, tensor
    yield NAME, Manifest(read_checksums(sums), num_bytes, num_bytes_bf16).to_tensor()


def read_checksums(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """`checksum` results as numbers, in one transfer from the device."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return dict(zip(sums, values, strict=True))
