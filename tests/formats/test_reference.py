"""A GPU gives the bits that a CPU gives: actor and rollout may quantize on different devices."""

import pytest
import torch
from qerl_testing import quantize_group

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.formats.nvfp4 import SCALE_CHOICES
from verl_qerl.formats.reference import dequantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", SCALE_CHOICES)
def test_gpu_and_cpu_quantize_to_the_same_bits(scale: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-6, 0, 256)[:, None]
    weights = {
        "gaussian": torch.randn(512, 3584, generator=generator) * 0.02,
        "spread": torch.randn(256, 1024, generator=generator) * spread,
        "grid": torch.arange(-256, 256).repeat(4, 1) / 64,  # ties
        "zero": torch.zeros(4, 64),
    }
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    on_cpu = quantize_group(weights, scale)
    on_gpu = quantize_group({name: weight.cuda() for name, weight in weights.items()}, scale)
    for name, weight in on_cpu.items():
        assert weight_digest(on_gpu[name]) == weight_digest(weight), name
        assert torch.equal(dequantize(on_gpu[name]).cpu().view(torch.int16), dequantize(weight).view(torch.int16)), name
