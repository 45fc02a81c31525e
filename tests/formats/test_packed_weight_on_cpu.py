import pytest
import torch

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, INT8, get_format
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.reference import dequantize, relative_error
from verl_qerl.formats.tensor_spec import DTYPES

NAMES = sorted(FORMATS)


def weight(N=48, K=96, seed=0):
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def packed(name, dense=None):
    form = get_format(name)
    return form.quantize(weight() if dense is None else dense)


@pytest.mark.parametrize("name", NAMES)
def test_it_stands_for_what_the_format_decodes(name):
    form, found = get_format(name), packed(name)
    assert found.form == form
    assert found.shape == (48, 96)
    parts = form.to_tensors(form.quantize(weight()))
    assert torch.equal(dequantize(found), form.dequantize(found.tensors))
    named = named_tensors("m", found)
    assert list(named) == [f"m.{part}" for part in form.parts]
    assert all(torch.equal(named[f"m.{part}"], tensor) for part, tensor in parts.items())
    assert found.size_bytes == sum(tensor.nbytes for tensor in parts.values())
    moved = found.to("cpu")
    assert weight_digest(moved) == weight_digest(found)


@pytest.mark.parametrize("name", NAMES)
def test_specs_are_those_of_the_parts(name):
    form = get_format(name)
    for part, spec in form.specs(48, 96).items():
        tensor = form.to_tensors(form.quantize(weight()))[part]
        assert (DTYPES[spec.dtype], spec.shape) == (tensor.dtype, tuple(tensor.shape))
    assert tuple(form.specs(48, 96)) == form.parts


@pytest.mark.parametrize("name", NAMES)
def test_a_digest_sees_each_bit_of_each_part(name):
    form = get_format(name)
    before = weight_digest(packed(name))
    seen = {before}
    for i in range(len(form.parts)):
        changed = form.quantize(weight())
        flat = changed.tensors[i].view(-1).view(torch.uint8)
        flat[len(flat) // 2] ^= 1
        seen.add(weight_digest(changed))
    assert len(seen) == 1 + len(form.parts)


def test_digests_tell_formats_and_shapes_apart():
    zeros = {name: packed(name, torch.zeros(32, 64)) for name in NAMES}
    assert len({weight_digest(found) for found in zeros.values()}) == len(NAMES)
    assert weight_digest(packed("int8", torch.zeros(32, 64))) != weight_digest(packed("int8", torch.zeros(64, 32)))


@pytest.mark.parametrize("name", NAMES)
def test_the_relative_error_is_that_of_the_whole(name, monkeypatch):
    from verl_qerl.formats import base

    dense, found = weight(), packed(name)
    error = (dequantize(found, torch.float32).double() - dense.double()).norm() / dense.double().norm()
    monkeypatch.setitem(base._CHUNK_ELEMENTS, "cpu", 500)  # several rows at a time, the last ones fewer
    assert relative_error(dense, found) == pytest.approx(float(error), rel=1e-6)
    assert relative_error(torch.zeros(4, 32), packed(name, torch.zeros(4, 32))) == 0


def int8(**changed):
    return INT8().to_tensors(INT8().quantize(weight())) | changed


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"weight": torch.zeros(4, 4, dtype=torch.int8)}, r"^m lacks \['weight_scale'\]\. Download or quantize"),
        (
            int8(extra=torch.ones(1)),
            r"^m has \['extra'\] beside what a weight in INT8 is made of.* weight, weight_scale\.",
        ),
        (int8(weight=torch.zeros(48, 96)), r"weight of INT8 is torch.int8 \(48, 96\).*not torch.float32"),
        (int8(weight_scale=torch.ones(48)), r"weight_scale of INT8 is torch.float32 \(48, 1\) .* \(48,\)"),
        (int8(weight=torch.zeros(4, dtype=torch.int8)), r"codes of INT8 are a matrix, not \(4,\)"),
    ],
    ids=["missing", "unknown", "dtype", "shape", "vector"],
)
def test_tensors_that_are_no_weight_are_refused(tensors, sentence):
    with pytest.raises(CheckpointFormatError, match=sentence):
        INT8().from_tensors("m", tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_comes_back_from_the_tensors_of_each_layout(name):
    form, found = get_format(name), packed(name)
    for layout in form.layouts:
        tensors = form.to_tensors(found, layout)
        assert {key: (DTYPES[spec.dtype], spec.shape) for key, spec in form.specs(48, 96, layout).items()} == {
            key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()
        }
        assert weight_digest(form.from_tensors("m", tensors, layout)) == weight_digest(found)
