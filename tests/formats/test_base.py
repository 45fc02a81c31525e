"""The quantizers on a GPU give the bits of a CPU."""

import pytest
import torch

from verl_qerl.checkpoints.manifest import checksum
from verl_qerl.formats import FORMATS, get_format

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("scale", [1e-30, 0.02, 1.0, 1e30])
def test_a_gpu_gives_the_same_bits(name, scale):
    form = get_format(name)
    weight = (torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
    weight[3] = 0
    weight[4, ::2] = -0.0
    one, other = form.quantize(weight), form.quantize(weight.cuda())
    for part in form.parts:
        assert torch.equal(one[part].view(torch.uint8), other[part].cpu().view(torch.uint8)), part
        assert int(checksum(one[part])) == int(checksum(other[part]))
    decoded = form.dequantize(other)
    assert torch.equal(form.dequantize(one).view(torch.uint8), decoded.cpu().view(torch.uint8))
