import torch

from verl_qerl.formats import NVFP4, reference
from verl_qerl.formats.nvfp4_layout import to_tensors


def test_it_is_the_format_of_the_packed_base():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    for scale in reference.SCALE_CHOICES:
        packed = reference.quantize(weight, scale)
        found = NVFP4(scale=scale).quantize(weight)
        for name, tensor in to_tensors("m", packed).items():
            assert torch.equal(found[name.removeprefix("m.")].view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(NVFP4().dequantize(found), reference.dequantize(packed))
