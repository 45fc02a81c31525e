"""Measures, random inputs and the state of the code, shared by tests and benchmarks."""

import math
import os
import subprocess

import torch

from verl_qerl.nvfp4.format import PackedWeight
from verl_qerl.nvfp4.reference import quantize


def rms_error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN in `actual` gives NaN."""
    expected = expected.double()
    norm = expected.norm()
    error = (actual.double() - expected).norm()
    return float(error / norm) if norm > 0 else float(error)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, ratio: float) -> None:
    """Assert that the RMS error is at most `ratio` of the RMS of `expected` (scale free; NaN never passes).

    Raises:
        AssertionError: Shapes differ or the error is larger.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    found = rms_error_ratio(actual, expected)
    assert found <= ratio, f"RMS error ratio {found:.3e} > {ratio:.3e}"


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    ratio = rms_error_ratio(actual, expected)
    return math.inf if ratio == 0 else -20 * math.log10(ratio)


def random_packed_weight(N: int, K: int, seed: int = 0, device: str | torch.device = "cpu") -> PackedWeight:
    """A Gaussian weight of standard deviation 0.02, quantized with `minmax`."""
    generator = torch.Generator().manual_seed(seed)
    return quantize((torch.randn(N, K, generator=generator) * 0.02).to(device))


def current_commit() -> str:
    """What a result file names: QERL_COMMIT where it is set (a copy of the tree is measured), else git's short hash."""
    named = os.environ.get("QERL_COMMIT")
    if named:
        return named
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
