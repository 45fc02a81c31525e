"""INT8, symmetric, with one scale an output channel: weight in [-127, 127]."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_qerl.formats.channel import ChannelFormat, channel_scale

INT8_MAX = 127.0  # -128 is left out: the grid is symmetric


@dataclass(frozen=True)
class INT8(ChannelFormat):
    """`weight` [N, K] int8 and `weight_scale` [N, 1] float32."""

    name: str = "int8"
    kind: str = "INT8"
    codes: ClassVar[str] = "I8"
    number: ClassVar[str] = "int"

    @staticmethod
    def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ChannelFormat.quantize_rows`."""
        scale = channel_scale(rows, INT8_MAX)
        codes = (rows.float() / scale).round()  # ties to even; the largest quotient is 127 but for a rounding
        return codes.to(torch.int8), scale
