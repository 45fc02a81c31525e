"""Weight formats of quantized rollouts and packed bases, under one small interface: int8, fp8, mxfp4 and nvfp4."""

from dataclasses import replace

from verl_qerl.formats.base import WeightFormat
from verl_qerl.formats.fp8 import FP8
from verl_qerl.formats.int8 import INT8
from verl_qerl.formats.mxfp4 import MXFP4
from verl_qerl.formats.nvfp4 import NVFP4
from verl_qerl.formats.reference import SCALE_CHOICES

FORMATS: dict[str, WeightFormat] = {found.name: found for found in (FP8(), INT8(), MXFP4(), NVFP4())}


def get_format(name: str) -> WeightFormat:
    """The format of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in FORMATS:
        raise ValueError(
            f"unknown weight format: format={name!r}. Accepted are {', '.join(FORMATS)}. Choose one of them."
        )
    return FORMATS[name]


def scale_choices(name: str) -> tuple[str, ...]:
    """How the format of that name can choose its scales, the default first; NVFP4 alone has more than one way."""
    return SCALE_CHOICES if name == NVFP4.name else ("minmax",)


def scaled_format(name: str, scale: str | None = None) -> WeightFormat:
    """The format of that name with a choice of scale; None is its default.

    Raises:
        ValueError: There is no such format or choice.
    """
    form, choices = get_format(name), scale_choices(name)
    if scale is None:
        return form
    if scale not in choices:
        raise ValueError(
            f"unknown scale choice: scale={scale!r} of {name}. Accepted are {', '.join(choices)}. Choose one of them."
        )
    return replace(form, scale=scale) if isinstance(form, NVFP4) else form


__all__ = ["FORMATS", "FP8", "INT8", "MXFP4", "NVFP4", "WeightFormat", "get_format", "scale_choices", "scaled_format"]
