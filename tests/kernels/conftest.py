import pytest
import torch

from verl_qerl.nvfp4.format import PackedWeight


@pytest.fixture(scope="session")
def every_byte() -> PackedWeight:
    """[127, 512]: every finite, non-negative E4M3 byte, subnormals too, times every byte of two codes."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    return PackedWeight(codes, scale, torch.tensor(2.0**-12))
