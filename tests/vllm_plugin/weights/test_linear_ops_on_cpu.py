"""The operators' references, which a machine without a GPU runs."""

import pytest
import torch

pytest.importorskip("vllm")
from qerl_testing import quantize, random_packed_weight
from small_adapter import draw, share_that_arrives

from verl_qerl.formats import reference
from verl_qerl.kernels.rollout.lora import lora_expand, lora_shrink, member_of_tile
from verl_qerl.kernels.rollout.repacking import repack
from verl_qerl.kernels.rollout.w4a16_launch import TOKENS, guess_launch
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.weights import linear_ops
from verl_qerl.vllm_plugin.weights.linear_ops import linear_repacked, lora_linear_repacked
from verl_qerl.vllm_plugin.weights.plans import Plan

ACTIVE, NONE = torch.tensor([False]), torch.tensor([True])


@pytest.fixture
def given():
    """(x, tensors of the weight, dense weight, bias, adapter)"""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight = random_packed_weight(128, 64)
    adapter = (random(32, 64), random(128, 16), member_of_tile((64, 64), "cpu"), torch.tensor([0, 0, -1, 0, 0, 0]))
    return random(5, 64), repack(weight), reference.dequantize(weight, torch.bfloat16), random(128), adapter


def test_multiplies_by_the_decoded_weight(given):
    x, tensors, dense, bias, _ = given
    expected = torch.nn.functional.linear(x, dense, bias)
    assert torch.equal(linear_repacked(x, *tensors, bias, ""), expected)


def test_adds_adapter_and_bias(given):
    x, tensors, dense, bias, (a, *rest) = given
    out = lora_linear_repacked(x, *tensors, bias, "", a, *rest, ACTIVE)
    y = torch.nn.functional.linear(x, dense)
    expected = lora_expand(y, lora_shrink(x, a, ACTIVE), *rest, ACTIVE, bias, 64)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-6)
    assert torch.equal(out[2], linear_repacked(x, *tensors, bias, "")[2])  # a token without an adapter
    assert (out - linear_repacked(x, *tensors, bias, "")).abs().max() > 1


@pytest.mark.parametrize(("slices", "rank"), [((256, 64, 64), 16), ((64, 128), 8), ((192,), 32)])
def test_each_member_has_its_own_adapter(slices, rank):
    generator = torch.Generator().manual_seed(2)
    x, a, b = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((7, 64), (len(slices) * rank, 64), (sum(slices), rank))
    )
    weight, slots = random_packed_weight(sum(slices), 64), torch.tensor([0, -1, *[0] * 8])
    out = lora_linear_repacked(x, *repack(weight), None, "", a, b, member_of_tile(slices, "cpu"), slots, ACTIVE)
    lows = (x.double() @ a.double().T).bfloat16().double().split(rank, 1)
    terms = [low @ part.double().T for low, part in zip(lows, b.split(slices), strict=True)]
    term = torch.cat(terms, 1) * (slots[:7, None] >= 0)
    expected = x.double() @ reference.dequantize(weight, torch.float64).T + term
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize("bias", [None, 4.0])
def test_nothing_of_a_small_adapter_is_lost(bias):
    x, W, A = draw(4096, 256, 256, 8, "cpu")
    weight, members, slots = repack(quantize(W.float())), member_of_tile((256,), "cpu"), torch.zeros(4096).long()
    biases = None if bias is None else torch.full((256,), bias, dtype=x.dtype)
    share = share_that_arrives(
        lambda B: lora_linear_repacked(x, *weight, biases, "", A, B, members, slots, ACTIVE), x, A, 256
    )
    assert share == pytest.approx(1, abs=0.1)


def test_without_an_active_adapter_it_is_the_base(given):
    x, tensors, _, bias, (a, *rest) = given
    out = lora_linear_repacked(x, *tensors, bias, "", a, *rest, NONE)
    torch.testing.assert_close(out, linear_repacked(x, *tensors, bias, ""), rtol=1e-2, atol=1e-2)


def test_can_be_traced(given):
    x, tensors, _, bias, (a, *rest) = given
    torch.library.opcheck(linear_repacked, (x, *tensors, bias, ""))
    torch.library.opcheck(lora_linear_repacked, (x, *tensors, None, "", a, *rest, ACTIVE))


@pytest.fixture
def called(monkeypatch):
    """Names of the kernels that the GPU's side of the operators would have launched."""
    names = []

    def record(name, result):
        def kernel(*args, **kwargs):
            adapters = [arg for arg in args if isinstance(arg, linear_ops.Adapter)]
            names.append(name + " with adapter" * len(adapters))
            return result(*args)

        return kernel

    def product(x, words, scale, *_):
        return x.new_zeros(x.shape[0], scale.shape[1])

    def dense(words, scale, decode_scale, more_columns=0):
        return torch.zeros(128, 64 + more_columns).bfloat16()

    def shrink(x, a, *_):
        return x.new_zeros(x.shape[0], a.shape[0])

    monkeypatch.setattr(linear_ops, "w4a16_matmul", record("tiled", product))
    monkeypatch.setattr(linear_ops, "decode", record("decode", dense))
    monkeypatch.setattr(linear_ops, "lora_shrink", record("lora_shrink", shrink))
    monkeypatch.setattr(linear_ops, "lora_expand", record("lora_expand", lambda y, *_: y))
    plan = Plan(tuple(guess_launch(128, 64, tokens) for tokens in TOKENS), decode_rows=300)
    monkeypatch.setattr(linear_ops, "PLANS", {"128x64": plan})
    return names


@pytest.mark.parametrize(("rows", "path"), [(1, "tiled"), (299, "tiled"), (300, "decode")])
def test_rows_choose_the_kernel(rows, path, given, called):
    _, tensors, *_ = given
    x, slots = torch.zeros(rows, 64).bfloat16(), torch.zeros(rows, dtype=torch.int64)
    a, b = torch.zeros(16, 64).bfloat16(), torch.zeros(128, 16).bfloat16()
    adapter = (a, b, torch.zeros(1, dtype=torch.int32), slots)  # one member of 128 columns
    linear_repacked(x, *tensors, None, "128x64")
    assert called == [path]
    called.clear()
    lora_linear_repacked(x, *tensors, None, "128x64", *adapter, ACTIVE)
    assert called == ["tiled with adapter" if path == "tiled" else "decode"]
    called.clear()
    lora_linear_repacked(x, *tensors, None, "128x64", *adapter, NONE)
    assert called == [path]


def test_an_adapter_that_cannot_be_folded_in_is_added_by_itself_and_that_is_said(given, called, caplog):
    say_once.cache_clear()
    _, tensors, *_ = given
    x, slots = torch.zeros(32, 64).bfloat16(), torch.zeros(32, dtype=torch.int64)
    a, b = torch.zeros(24, 64).bfloat16(), torch.zeros(128, 24).bfloat16()
    members = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        called.clear()
        lora_linear_repacked(x, *tensors, None, "128x64", a, b, members, slots, ACTIVE)
        assert called == ["lora_shrink", "tiled", "lora_expand"]
    said = "verl_qerl: linears of 128x64 take three launches with an adapter of rank 24: "
    assert [record.message[: len(said)] for record in caplog.records] == [said]
