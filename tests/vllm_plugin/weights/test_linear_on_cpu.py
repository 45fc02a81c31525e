"""Which layers W4A16Kernel leaves to Marlin, and that it says so. The rest needs a GPU: test_linear.py."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from qerl_testing import random_packed_weight
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig

from verl_qerl.kernels.rollout.repacking import undo_repack
from verl_qerl.vllm_plugin.log import say_once
from verl_qerl.vllm_plugin.weights import linear

CPU = "an unknown GPU"


@pytest.fixture
def kernel(monkeypatch):
    """Made without the question whether this machine has a GPU; `left` are the layers that went to Marlin."""
    say_once.cache_clear()
    made = linear.W4A16Kernel.__new__(linear.W4A16Kernel)
    made.config, made.left = NvFp4LinearLayerConfig(), []
    made._marlin = SimpleNamespace(process_weights_after_loading=made.left.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: CPU)
    return made


def layer_of(N: int, K: int, dtype: torch.dtype = torch.bfloat16, weight=None, members=1) -> SimpleNamespace:
    weight = weight or random_packed_weight(N, K)
    parameters = (torch.nn.Parameter(part, requires_grad=False) for part in (weight.codes, weight.block_scale))
    codes, scale = parameters
    return SimpleNamespace(
        weight=codes,
        weight_scale=scale,
        weight_global_scale=torch.nn.Parameter(weight.global_decode_scale, requires_grad=False),
        params_dtype=dtype,
        logical_widths=[N // members] * members,
    )


def test_a_layer_is_arranged_and_keeps_its_values(kernel, monkeypatch):
    monkeypatch.setattr(linear, "make_plan", lambda N, K, gpu, tile: f"{N}x{K} by {tile}")
    weight = random_packed_weight(384, 128)
    layer = layer_of(384, 128, weight=weight, members=2)
    kernel.process_weights_after_loading(layer)
    assert layer.qerl_plan == "384x128 by 64"
    back = undo_repack(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.block_scale.view(torch.uint8), weight.block_scale.view(torch.uint8))
    layer.qerl_plan = ""  # as without a GPU
    x = torch.randn(3, 128).bfloat16()
    assert kernel.apply_weights(layer, x).shape == (3, 384)
    assert not kernel.left


def test_subnormal_scales_go_to_marlin_and_it_is_said_once(kernel, caplog):
    layers = [layer_of(256, 128), layer_of(256, 128)]
    for layer in layers:
        layer.weight_scale.data.view(torch.uint8)[3, 2] = 7
        kernel.process_weights_after_loading(layer)
    assert kernel.left == layers
    assert [record.message for record in caplog.records] == [
        "verl_qerl: NVFP4 linears run on Marlin: 256 x 128 with block scales below 2**-6: the faster kernel takes none."
    ]


def test_new_weights_go_where_the_first_ones_went(kernel, monkeypatch):
    monkeypatch.setattr(linear, "make_plan", lambda *args: "plan")
    subnormal = random_packed_weight(256, 128)
    subnormal.block_scale.view(torch.uint8)[3, 2] = 7
    layer = layer_of(256, 128)
    kernel.process_weights_after_loading(layer)
    vars(layer).update(vars(layer_of(256, 128, weight=subnormal)))  # as vLLM's reload does
    with pytest.raises(ValueError, match=r"^new weights of a linear cannot be loaded: 256 x 128 with block scales"):
        kernel.process_weights_after_loading(layer)
    assert not kernel.left

    layer = layer_of(256, 128, weight=subnormal)
    kernel.process_weights_after_loading(layer)
    layer.workspace = torch.empty(1)  # Marlin makes one
    vars(layer).update(vars(layer_of(256, 128)))
    kernel.process_weights_after_loading(layer)
    assert kernel.left == [layer, layer]
    assert not hasattr(layer, "qerl_plan")


@pytest.mark.parametrize(
    ("layer", "part"),
    [((96, 128), "96 x 128"), ((128, 96), "128 x 96"), ((256, 128, torch.float16), "torch.float16")],
    ids=str,
)
def test_what_the_kernel_does_not_take_goes_to_marlin(kernel, layer, part, caplog):
    given = layer_of(*layer)
    before = given.weight
    kernel.process_weights_after_loading(given)
    assert kernel.left == [given]
    assert given.weight is before
    assert part in caplog.text
    assert not hasattr(given, "qerl_plan")
