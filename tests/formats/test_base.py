"""The quantizers on a GPU give the bits of a CPU."""

import pytest
import torch

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.manifest import checksum
from verl_qerl.formats import FORMATS, get_format
from verl_qerl.formats.reference import dequantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("scale", [1e-30, 0.02, 1.0, 1e30])
def test_a_gpu_gives_the_same_bits(name, scale):
    form = get_format(name)
    weight = (torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
    weight[3] = 0
    weight[4, ::2] = -0.0
    one, other = form.quantize(weight), form.quantize(weight.cuda())
    assert weight_digest(one) == weight_digest(other)
    for part, there in zip(one.tensors, other.tensors, strict=True):
        assert int(checksum(part)) == int(checksum(there))
    decoded = dequantize(other)
    assert torch.equal(dequantize(one).view(torch.uint8), decoded.cpu().view(torch.uint8))
