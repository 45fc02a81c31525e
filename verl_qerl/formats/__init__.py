"""Weight formats of quantized rollouts and packed bases, under one small interface: int8, fp8, mxfp4 and nvfp4."""

from dataclasses import replace

from verl_qerl.formats.base import PackedWeight, WeightFormat
from verl_qerl.formats.channel import FP8, INT8
from verl_qerl.formats.mxfp4 import MXFP4
from verl_qerl.formats.nvfp4 import NVFP4

FORMATS: dict[str, WeightFormat] = {found.name: found for found in (FP8(), INT8(), MXFP4(), NVFP4())}
DEFAULT_FORMAT: WeightFormat = FORMATS["nvfp4"]


def get_format(name: str, scale: str | None = None) -> WeightFormat:
    """The format of that name with a choice of scale, None is its default; a ValueError if there is none."""
    if name not in FORMATS:
        raise ValueError(
            f"unknown weight format: format={name!r}. Accepted are {', '.join(FORMATS)}. Choose one of them."
        )
    return FORMATS[name] if scale is None else replace(FORMATS[name], scale=scale)


__all__ = ["DEFAULT_FORMAT", "FORMATS", "FP8", "INT8", "MXFP4", "NVFP4", "PackedWeight", "WeightFormat", "get_format"]
