"""FP8 E4M3 with one scale an output channel: |weight| <= 448."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_qerl.formats.base import PackedWeight
from verl_qerl.formats.channel import ChannelFormat, channel_scale

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448.0


@dataclass(frozen=True)
class FP8(ChannelFormat):
    """`weight` [N, K] float8_e4m3fn and `weight_scale` [N, 1] float32."""

    name: str = "fp8"
    kind: str = "FP8"
    codes: ClassVar[str] = "F8_E4M3"
    number: ClassVar[str] = "float"

    @staticmethod
    def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ChannelFormat.quantize_rows`."""
        scale = channel_scale(rows, E4M3_MAX)
        # E4M3 has no infinity: above 464 would be NaN. The largest quotient is 448 but for a rounding of float32.
        return (rows.float() / scale).to(torch.float8_e4m3fn), scale

    def _read(self, where: str, tensors: tuple[torch.Tensor, ...], layout: str) -> PackedWeight:
        weight = super()._read(where, tensors, layout)
        if bool((weight.codes.view(torch.uint8) & 0x7F == 0x7F).any()):  # NaN
            raise ValueError("its codes are not all numbers.")
        return weight
