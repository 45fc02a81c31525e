"""What INT8 and FP8 have in common; the codes of each are in its own file."""

import pytest
import torch

from verl_qerl.formats import FP8, INT8, reference

FORMATS = [INT8(), FP8()]
TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_channel_of_zeros_and_one_of_the_smallest_numbers_stay_finite(form):
    found = form.quantize(torch.tensor([[0.0, -0.0], [2.0**-133, -(2.0**-133)]]))
    assert found["weight_scale"].tolist() == [[TINY], [TINY]]
    assert form.dequantize(found).abs().max() < TINY


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_chunking_changes_nothing(monkeypatch, form, chunk):
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    whole = form.quantize(weight)
    monkeypatch.setitem(reference._CHUNK_ELEMENTS, "cpu", chunk)
    again = form.quantize(weight)
    assert all(torch.equal(again[part], whole[part]) for part in form.parts)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_tokens_are_quantized_as_channels_are(form):
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = form.quantize_rows(rows)
    found = form.quantize(rows)
    assert torch.equal(codes.view(torch.uint8), found["weight"].view(torch.uint8))
    assert torch.equal(scale, found["weight_scale"])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_no_quantizer_writes_are_refused(form, scale):
    tensors = form.quantize(torch.ones(2, 64))
    form.check_values(tensors)
    tensors["weight_scale"][1] = scale
    with pytest.raises(ValueError, match="its scales are not all positive numbers"):
        form.check_values(tensors)
