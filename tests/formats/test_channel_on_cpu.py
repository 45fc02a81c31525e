"""What INT8 and FP8 have in common; the codes of each are in its own file."""

import pytest
import torch

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FP8, INT8, base
from verl_qerl.formats.reference import dequantize

FORMATS = [INT8(), FP8()]
TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_channel_of_zeros_and_one_of_the_smallest_numbers_stay_finite(form):
    found = form.quantize(torch.tensor([[0.0, -0.0], [2.0**-133, -(2.0**-133)]]))
    assert found.block_scale.tolist() == [[TINY], [TINY]]
    assert dequantize(found).abs().max() < TINY


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_chunking_changes_nothing(monkeypatch, form, chunk):
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    whole = form.quantize(weight)
    monkeypatch.setitem(base._CHUNK_ELEMENTS, "cpu", chunk)
    again = form.quantize(weight)
    assert all(torch.equal(one, other) for one, other in zip(again.tensors, whole.tensors, strict=True))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_tokens_are_quantized_as_channels_are(form):
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = form.quantize_rows(rows)
    found = form.quantize(rows)
    assert torch.equal(codes.view(torch.uint8), found.codes.view(torch.uint8))
    assert torch.equal(scale, found.block_scale)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_no_quantizer_writes_are_refused(form, scale):
    tensors = form.to_tensors(form.quantize(torch.ones(2, 64)))
    form.from_tensors("m", tensors)
    tensors["weight_scale"][1] = scale
    with pytest.raises(CheckpointFormatError, match=r"m is no weight in .*: its scales are not all positive numbers"):
        form.from_tensors("m", tensors)
