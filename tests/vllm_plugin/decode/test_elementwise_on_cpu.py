"""Which of vLLM's modules are replaced, and that those in their place compute the same bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, MRotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.models.qwen3 import Qwen3Attention

from verl_qerl.vllm_plugin import worker as worker_module
from verl_qerl.vllm_plugin.decode.elementwise import (
    PDLQwen3Attention,
    PDLRMSNorm,
    PDLRotaryEmbedding,
    PDLSiluAndMul,
    use_programmatic_launch,
)
from verl_qerl.vllm_plugin.weights.linear import repacked_in_features

K = 128


@pytest.fixture
def layer():
    """Norms and an activation as a layer of Qwen3 has them."""
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        modules = {
            "input_layernorm": RMSNorm(K, 1e-5, dtype=torch.bfloat16),
            "q_norm": RMSNorm(64),
            "rotary_emb": RotaryEmbedding(64, 64, 512, 1e4, True, torch.bfloat16),
            "act": SiluAndMul(),
        }
    modules["input_layernorm"].weight.data.normal_(1, 0.1)
    return torch.nn.ModuleDict(modules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_are_those_of_vllm(layer, dtype):
    norm, act = layer["input_layernorm"], layer["act"]
    norm.weight.data = norm.weight.data.to(dtype)
    x, residual = (3 * torch.randn(7, K).bfloat16() for _ in range(2))
    wide = torch.randn(2, 3, 2 * K).bfloat16()
    # Clones: vLLM's may write into what it is given.
    alone, both, activated = norm(x.clone()), norm(x.clone(), residual.clone()), act.forward_native(wide)
    positions, q, k = torch.arange(7), torch.randn(7, 192).bfloat16(), torch.randn(7, 64).bfloat16()
    turned = layer["rotary_emb"].forward_native(positions, q, k)
    use_programmatic_launch(layer, {K})
    assert [type(layer[name]) for name in ("input_layernorm", "act")] == [PDLRMSNorm, PDLSiluAndMul]
    assert all(torch.equal(*pair) for pair in zip(layer["rotary_emb"](positions, q, k), turned, strict=True))
    assert layer["rotary_emb"](positions, q)[1] is None  # a model without keys of its own
    assert torch.equal(norm(x), alone)
    assert all(torch.equal(*pair) for pair in zip(norm(x, residual), both, strict=True))
    assert torch.equal(act(wide), activated)
    narrow = torch.randn(3, 24).bfloat16()  # not a multiple of what a thread loads
    assert torch.equal(act(narrow), act.forward_native(narrow))


def test_only_rows_that_a_tiled_linear_multiplies(layer):
    use_programmatic_launch(layer, {K})
    assert [type(module) for module in layer.values()] == [PDLRMSNorm, RMSNorm, PDLRotaryEmbedding, PDLSiluAndMul]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_of_one_dtype_can_be_left_out(layer, dtype):
    layer["input_layernorm"].weight.data = layer["input_layernorm"].weight.data.to(dtype)
    norm = RMSNorm if dtype == torch.bfloat16 else PDLRMSNorm
    use_programmatic_launch(layer, {K}, left=torch.bfloat16)
    assert [type(module) for module in layer.values()] == [norm, RMSNorm, PDLRotaryEmbedding, PDLSiluAndMul]


class Scaled(RMSNorm):
    """A model's own."""


def test_what_computes_something_else_stays():
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        modules = [RMSNorm(K, has_weight=False), RMSNorm(K, var_hidden_size=64), GemmaRMSNorm(K), Scaled(K)]
        modules.append(RMSNorm(K, dtype=torch.float16))
        for head_size, rotary_dim, is_neox_style in ((64, 32, True), (64, 64, False)):
            modules.append(RotaryEmbedding(head_size, rotary_dim, 512, 1e4, is_neox_style, torch.bfloat16))
        modules.append(RotaryEmbedding(64, 64, 512, 1e4, True, torch.float32))
    kinds = [type(module) for module in modules]
    use_programmatic_launch(torch.nn.ModuleList(modules), {K})
    assert [type(module) for module in modules] == kinds


def test_rotations_of_other_frequencies_are_replaced():
    sizes = (64, 64, 512, 1e4)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        scaled = Llama3RotaryEmbedding(*sizes, True, torch.bfloat16, 8.0, 1.0, 4.0, 256)
        of_images = MRotaryEmbedding(*sizes, True, torch.bfloat16, mrope_section=[8, 12, 12])
        rotations, usual = [scaled, of_images], RotaryEmbedding(*sizes, True, torch.bfloat16)
    given = torch.arange(7), torch.randn(7, 192).bfloat16(), torch.randn(7, 64).bfloat16()
    expected = scaled.forward_native(*given)
    assert not torch.equal(expected[0], usual.forward_native(*given)[0])
    use_programmatic_launch(torch.nn.Sequential(torch.nn.Linear(1, 1), *rotations), {K})
    assert [type(one) for one in rotations] == [PDLRotaryEmbedding, MRotaryEmbedding]
    assert all(torch.equal(*pair) for pair in zip(scaled(*given), expected, strict=True))


def attention(**options: Any) -> Qwen3Attention:
    """What its forward reads; a real one needs an engine."""
    found: Any = object.__new__(Qwen3Attention)
    torch.nn.Module.__init__(found)
    found.head_dim, found.q_size, found.kv_size = 64, 128, 64
    found.q_norm, found.k_norm = (RMSNorm(64, options.get(name, 1e-6)) for name in ("q", "k"))
    rotary_dim = options.get("rotary_dim", 64)
    found.rotary_emb = RotaryEmbedding(64, rotary_dim, 512, 1e4, True, options.get("dtype", torch.bfloat16))
    found.qkv_proj = found.o_proj = lambda x: (x, None)
    found.attn = lambda *qkv: torch.cat(qkv, -1)
    return found


def test_heads_are_normalized_as_vllm_does():
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        one = attention()
    for norm in (one.q_norm, one.k_norm):
        norm.weight.data = (1 + 0.1 * torch.randn(64)).bfloat16()
    positions, x = torch.arange(7), torch.randn(7, 256).bfloat16()
    one.rotary_emb._forward_method = one.rotary_emb.forward_native  # vLLM's for a CPU rounds otherwise
    expected = one(positions, x)
    use_programmatic_launch(one, {K})
    assert (type(one), type(one.rotary_emb)) == (PDLQwen3Attention, PDLRotaryEmbedding)
    assert torch.equal(one(positions, x), expected)
    # Positions of images and text go to the modules themselves.
    assert torch.equal(one(positions.int(), x), expected)


@pytest.mark.parametrize("options", [{"q": 1e-5}, {"rotary_dim": 32}, {"dtype": torch.float32}], ids=str)
def test_heads_that_the_kernel_does_not_take_stay(options):
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        one = attention(**options)
    use_programmatic_launch(one, {K})
    assert type(one) is Qwen3Attention


def test_columns_are_those_of_linears_with_a_plan():
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(3)])
    for plan, layer in zip(("4x128", "", "4x256"), model, strict=True):
        layer.qerl_plan = plan  # empty on a CPU
    model[0].weight = torch.nn.Parameter(torch.zeros(8, 8))
    model[2].weight = torch.nn.Parameter(torch.zeros(16, 8))
    assert repacked_in_features(model) == {128, 256}
    assert repacked_in_features(torch.nn.ReLU()) == set()


def kinds_of(worker) -> list[str]:
    return [type(module).__name__ for module in worker.model_runner.get_model().modules()]


@pytest.fixture
def hopper(monkeypatch):
    """As if linears of 128 columns were tiled, as they are on a GPU."""
    monkeypatch.setattr(worker_module, "repacked_in_features", lambda model: {K})
    _ROPE_DICT.clear()  # engines of one process share them
    yield
    _ROPE_DICT.clear()


@pytest.mark.parametrize("options", [{}, {"aqn": {"enabled": True}}], ids=["plain", "noise"])
def test_an_engine_computes_the_same(start, model_dir, prompt_log_probs, hopper, monkeypatch, options):
    engine = start(model_dir("qwen3"), **options)
    kinds = engine.collective_rpc(kinds_of)[0]
    assert kinds.count("PDLRMSNorm") == 5
    assert kinds.count("PDLQwen3Attention") == 2
    assert kinds.count("RMSNorm") == 4  # of heads: their attention reads the weights
    assert kinds.count("PDLSiluAndMul") == 2
    assert kinds.count("PDLRotaryEmbedding") == 1  # all layers have one
    found = prompt_log_probs(engine)
    monkeypatch.undo()
    _ROPE_DICT.clear()
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)  # its own rounds otherwise
    stock = start(model_dir("qwen3"), **options)
    assert not any(kind.startswith("Early") for kind in stock.collective_rpc(kinds_of)[0])
    assert torch.equal(found, prompt_log_probs(stock))
    if options:
        for one in (engine, stock):
            one.collective_rpc("qerl_set_noise", args=(1e-2, 1))
            assert one.reset_prefix_cache()
        noisy = prompt_log_probs(engine)
        assert not torch.equal(noisy, found)
        assert torch.equal(noisy, prompt_log_probs(stock))


@pytest.mark.parametrize(("fuses", "noisy"), [(False, False), (True, False), (True, True)])
def test_norms_stay_where_vllm_fuses_them(layer, hopper, fuses, noisy):
    """It fuses those with a weight of the model's dtype; noise makes weights float32."""
    passes = SimpleNamespace(fuse_allreduce_rms=fuses)
    compilation = SimpleNamespace(pass_config=passes, cudagraph_mode=None)
    aqn = {"enabled": noisy, "targets": ["input_layernorm"]}
    config = SimpleNamespace(additional_config={"verl_qerl": {"aqn": aqn}}, compilation_config=compilation)
    text = SimpleNamespace(model_type="qwen2")
    vars(config).update(
        use_v2_model_runner=False,
        lora_config=None,
        model_config=SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text, enable_sleep_mode=False),
        parallel_config=SimpleNamespace(use_ubatching=False),
    )
    worker = SimpleNamespace(load_model=lambda: None)
    worker.model_runner = SimpleNamespace(get_model=lambda: layer, device=torch.device("cpu"))
    worker_module.prepare_model(worker, config)
    assert type(layer["act"]) is SiluAndMul
    worker.load_model()
    assert type(layer["act"]) is PDLSiluAndMul
    assert (type(layer["input_layernorm"]) is RMSNorm) == (fuses and not noisy)
