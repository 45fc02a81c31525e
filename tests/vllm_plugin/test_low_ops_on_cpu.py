"""Norms and activations that make X A^T: which linears they feed, and for which batches. Kernels: tests/emulator."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from verl_qerl.kernels import elementwise
from verl_qerl.kernels.lora import member_of_tile
from verl_qerl.kernels.tiled_launch import TOKENS, Launch
from verl_qerl.vllm_plugin import low_ops
from verl_qerl.vllm_plugin.elementwise import fuse_shrink, use_early_starts
from verl_qerl.vllm_plugin.plans import PLANS, Plan

HIDDEN, INNER, RANK = 256, 512, 16
LINEARS = {"qkv_proj": (HIDDEN, (256, 64, 64)), "gate_up_proj": (HIDDEN, (512, 512)), "down_proj": (INNER, (256,))}


def lora_layer(K, members, active=True, plan="test"):
    """As `lora._convert` leaves one, over a linear that `linear.hold_tiles` prepared."""
    N = sum(members)
    layer = torch.nn.Module()
    layer.base_layer = SimpleNamespace(
        qerl_plan=plan, weight=None, weight_scale=None, weight_global_scale=torch.full((1,), 2.0**-11), qerl_dense=None
    )
    layer.qerl_a, layer.qerl_b = torch.randn(len(members) * RANK, K).bfloat16(), torch.randn(N, RANK).bfloat16()
    layer.qerl_members = member_of_tile(members, "cpu")
    layer.qerl_none_active = torch.tensor([not active])
    layer.punica_wrapper = SimpleNamespace(_token_lora_indices=torch.zeros(512, dtype=torch.int64))
    return layer


@pytest.fixture
def layer(monkeypatch):
    """A decoder layer with adapters on all its linears."""
    launches = (Launch(1, 2, 1, 1),) * len(TOKENS)
    monkeypatch.setitem(PLANS, "test", Plan(launches, 1024, 1024))
    monkeypatch.setitem(PLANS, "cuBLAS", Plan(launches, 1, 1))
    found = torch.nn.Module()
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found.add_module(name, RMSNorm(HIDDEN, 1e-5, dtype=torch.bfloat16))
        found.self_attn, found.mlp = torch.nn.Module(), torch.nn.Module()
        found.mlp.act_fn = SiluAndMul()
    found.self_attn.qkv_proj = lora_layer(*LINEARS["qkv_proj"])
    for name in ("gate_up_proj", "down_proj"):
        found.mlp.add_module(name, lora_layer(*LINEARS[name]))
    assert use_early_starts(found, {HIDDEN, INNER}) == 3
    return found


@pytest.fixture
def made(monkeypatch):
    """What made X A^T: the operators run as on a GPU, and what they launch is noted."""
    names = []

    def note(name, real):
        monkeypatch.setattr(low_ops, f"{name}_low", lambda *args: names.append(name) or real(*args))

    note(
        "add_rms_norm", lambda x, residual, weight, epsilon, *_: elementwise.add_rms_norm(x, residual, weight, epsilon)
    )
    note("silu_mul", lambda x, *_: elementwise.silu_mul(x))
    return names


def run(layer, rows):
    """The three that feed a linear, as the operators do on a GPU."""
    x, residual, pair = (torch.randn(rows, size).bfloat16() for size in (HIDDEN, HIDDEN, 2 * INNER))
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        low_ops._norm_cuda(x, residual, norm.weight.data, 1e-5, *norm.qerl_fed)
    low_ops._silu_cuda(pair, *layer.mlp.act_fn.qerl_fed)


ALL = ["add_rms_norm", "add_rms_norm", "silu_mul"]


@pytest.mark.parametrize("least", [1, 33, 65])
@pytest.mark.parametrize("rows", [1, 32, 33, 64, 65, 256, 257])
def test_batches_of_the_size_that_is_asked_for(layer, made, rows, least):
    assert fuse_shrink(layer, least) == 3
    expected = ALL if least <= rows <= 256 else []
    run(layer, rows)
    assert made == expected


def test_without_a_token_that_has_the_adapter_nothing_is_made(layer, made):
    fuse_shrink(layer, 65)
    layer.mlp.down_proj.qerl_none_active.fill_(True)
    run(layer, 128)
    assert made == ["add_rms_norm"] * 2


def test_nor_for_a_linear_on_another_path(layer, made):
    layer.self_attn.qkv_proj.base_layer.qerl_plan = "cuBLAS"
    layer.mlp.gate_up_proj.qerl_members = torch.zeros(
        32, dtype=torch.int32
    )  # tiles narrower than a warpgroup's columns
    fuse_shrink(layer, 65)
    run(layer, 128)
    assert made == ["silu_mul"]


def test_each_feeds_its_own_linear(layer):
    fuse_shrink(layer, 65)
    pairs = [
        (layer.input_layernorm, layer.self_attn.qkv_proj),
        (layer.post_attention_layernorm, layer.mlp.gate_up_proj),
        (layer.mlp.act_fn, layer.mlp.down_proj),
    ]
    for giver, taker in pairs:
        assert giver.qerl_fed.a is taker.qerl_a
        assert giver.qerl_fed.slots is taker.punica_wrapper._token_lora_indices
        assert giver.qerl_fed.global_decode_scale is taker.base_layer.weight_global_scale


def test_what_feeds_no_adapted_packed_linear_stays_as_it_was(layer):
    del layer.self_attn.qkv_proj.qerl_a  # on vLLM's path for many adapters
    layer.mlp.gate_up_proj.qerl_b = torch.randn(1024, 24).bfloat16()  # a rank that the kernel does not take
    layer.mlp.down_proj = lora_layer(INNER + 32, (256,))  # of which the kernel takes no half chunk
    layer.mlp.down_proj.qerl_a = torch.randn(RANK, INNER + 32).bfloat16()
    assert fuse_shrink(layer, 65) == 0
    for giver in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.act_fn):
        assert giver.qerl_fed is None


def test_results_are_those_of_the_plain_operators_and_compilers_take_them(layer):
    def forward(x, residual, pair):
        y, total = layer.input_layernorm(x, residual)
        return y, total, layer.mlp.act_fn(pair)

    inputs = [torch.randn(70, size).bfloat16() for size in (HIDDEN, HIDDEN, 2 * INNER)]
    expected = forward(*inputs)
    fuse_shrink(layer, 65)
    for found in (forward(*inputs), torch.compile(forward, backend="aot_eager", fullgraph=True)(*inputs)):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    norm = layer.input_layernorm
    torch.library.opcheck(low_ops.norm_for_linear, (*inputs[:2], norm.weight.data, 1e-5, *norm.qerl_fed))
    torch.library.opcheck(low_ops.silu_for_linear, (inputs[2], *layer.mlp.act_fn.qerl_fed))
    rows_of_images = inputs[2][:, None]
    assert torch.equal(layer.mlp.act_fn(rows_of_images), expected[2][:, None])
    assert torch.equal(norm(inputs[0][:, None], inputs[1][:, None])[0], expected[0][:, None])


def test_an_engine_that_it_changes_nothing_for_says_so(start, model_dir, caplog):
    start(model_dir("qwen2"), additional={"fuse_shrink": 65}, enable_lora=True, max_lora_rank=8)
    assert "fuse_shrink changes nothing: no norm or activation feeds an adapted packed linear" in caplog.text
