"""What the bytes of an NVFP4 weight mean.

    w[n, k] = e2m1(codes)[n, k] * block_scale[n, k // 16] * global_decode_scale

E2M1 carries two significand bits and E4M3 four, so the product of code and block scale needs at most six; bf16 has
eight. With a global scale that is a power of two the bf16 value is therefore exact, and equals what Marlin and humming
multiply by.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448.0
E4M3_MIN_NORMAL = torch.finfo(torch.float8_e4m3fn).smallest_normal  # 2**-6; Marlin reads smaller block scales as zero

# Index = 4-bit code, bit 3 = sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Packed(ABC):
    """One weight [N, K] in packed form, as readers, writers and digests see it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K) = (out_features, in_features)."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Of all its tensors."""

    @property
    @abstractmethod
    def digested(self) -> tuple[str, tuple[torch.Tensor, ...]]:
        """A label and the tensors, in the order in which a digest goes over them."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Packed":
        """The same weight on `device`."""


@dataclass(frozen=True)
class PackedWeight(Packed):
    """One NVFP4 weight [N, K], K % 16 == 0.

    Attributes:
        codes: [N, K / 2] uint8, two E2M1 codes a byte, even k in the low nibble.
        block_scale: [N, K / 16] float8_e4m3fn, row-major, in [2**-6, 448].
        global_decode_scale: [] float32, multiplied to decode (amax / 2688 in ModelOpt's `weight_scale_2`; the inverse
            of compressed-tensors' `weight_global_scale`).
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_decode_scale: torch.Tensor

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit together.

        Raises:
            ValueError: A dtype or a shape is not the one the format asks for.
        """
        N, half_k = self.codes.shape
        found = (self.codes.dtype, self.block_scale.dtype, self.global_decode_scale.dtype)
        if found != (torch.uint8, torch.float8_e4m3fn, torch.float32):
            raise ValueError(f"an NVFP4 weight holds uint8, float8_e4m3fn and float32 tensors, not {found}.")
        if tuple(self.block_scale.shape) != (N, half_k * 2 // BLOCK_SIZE) or self.global_decode_scale.numel() != 1:
            raise ValueError(
                f"codes {tuple(self.codes.shape)} need block scales {(N, half_k * 2 // BLOCK_SIZE)} and one global"
                f" scale, not {tuple(self.block_scale.shape)} and {tuple(self.global_decode_scale.shape)}."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) = (out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, block scales and the global scale."""
        return self.codes.numel() + self.block_scale.numel() + 4

    @property
    def digested(self) -> tuple[str, tuple[torch.Tensor, ...]]:
        """Shape; codes, block scales and global scale."""
        return repr(tuple(self.shape)), (self.codes, self.block_scale, self.global_decode_scale.reshape(1))

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on `device`."""
        return PackedWeight(self.codes.to(device), self.block_scale.to(device), self.global_decode_scale.to(device))
