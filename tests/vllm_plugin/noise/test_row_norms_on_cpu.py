"""Norms that take each token's weight from a table, beside vLLM's own."""

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from verl_qerl.algos.aqn import NUM_DRAWS, AQNConfig, draw_noise, noisy_weight
from verl_qerl.vllm_plugin.decode.elementwise import PDLRMSNorm, use_programmatic_launch
from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise
from verl_qerl.vllm_plugin.noise.row_norms import RowRMSNorm, give_table
from verl_qerl.vllm_plugin.noise.synced_norms import SyncedNorms

K = 128
NAMES = ("input_layernorm", "post_attention_layernorm")


class Tables:
    """The rows of eight tokens."""

    def __init__(self):
        self.ids = torch.tensor([0, 3, 3, NUM_DRAWS, 1, 0, 0, 0], dtype=torch.int32)

    def give_tables(self, norms):
        return {name: give_table(name, norm, self.ids) for name, norm in norms.items()}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        modules = {name: RMSNorm(K, 1e-5, dtype=torch.bfloat16) for name in NAMES}
    for module in modules.values():
        module.weight.data.normal_(1, 0.1)
    return torch.nn.ModuleDict(modules)


def build(layer, tables=None, **options) -> NormNoise:
    return NormNoise(layer, AQNConfig(enabled=True, **options), 1.0, (tables or Tables()).give_tables)


def outputs(norm) -> list[torch.Tensor]:
    """Of one norm, of tokens and of heads, and what it adds up."""
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(5, K, generator=generator).bfloat16() for _ in range(2))
    heads = torch.randn(4, 3, K, generator=generator).bfloat16()
    return [norm(x.clone()), *norm(x.clone(), residual.clone()), norm(heads)]


def test_clean_rows_give_the_bits_of_vllms_norm(layer):
    for norm in layer.values():
        norm.weight.data = norm.weight.data.float()
    stock = [outputs(norm) for norm in layer.values()]
    noise = build(layer)
    assert all(type(norm) is RowRMSNorm for norm in layer.values())
    for sigma in (0.0, 0.5, 0.0):
        assert noise.apply(sigma, 1) == 2
        for norm, expected in zip(layer.values(), stock, strict=True):
            same = [torch.equal(*pair) for pair in zip(outputs(norm), expected, strict=True)]
            assert same == ([True] * 4 if sigma == 0.0 else [False, False, True, False])


@pytest.mark.parametrize("mode", ["additive", "multiplicative"])
def test_each_row_has_the_draw_of_its_number(layer, mode):
    clean = layer["input_layernorm"].weight.data.float()
    build(layer, mode=mode, seed=5).apply(1e-2, 7)
    table = layer["input_layernorm"].table
    assert torch.equal(table[0], clean)
    drawn = draw_noise(5, 7, "input_layernorm", NUM_DRAWS * K).view(NUM_DRAWS, K)
    assert torch.equal(table[1:], noisy_weight(clean, drawn, 1e-2, mode))
    # The first is that of the whole batch, and no two are alike.
    assert torch.equal(drawn[0], draw_noise(5, 7, "input_layernorm", K))
    assert (torch.corrcoef(drawn) - torch.eye(NUM_DRAWS)).abs().max() < 0.5


def test_a_token_has_the_weight_of_its_row(layer):
    tables = Tables()
    build(layer, tables).apply(1e-2, 1)
    norm, x = layer["input_layernorm"], torch.randn(5, K).bfloat16()
    for token, row in enumerate(tables.ids[:5].tolist()):
        scale = torch.rsqrt(x[token].float().pow(2).mean() + 1e-5)
        assert torch.equal(norm(x)[token], (x[token].float() * scale * norm.table[row]).bfloat16())
    before = norm(x)
    tables.ids.fill_(2)  # in place, as the runner does
    assert not torch.equal(norm(x), before)


def test_tables_change_in_place_and_come_back(layer):
    noise = build(layer)
    norm = layer["input_layernorm"]
    at, clean = norm.table.data_ptr(), norm.table.clone()
    assert norm.weight.data_ptr() == at
    for step in (1, 2):
        noise.apply(1e-2, step)
        assert torch.equal(norm.weight, clean[0])
        assert torch.count_nonzero(norm.table - clean) > 0.9 * NUM_DRAWS * K
    noise.apply(0.0, 0)
    assert torch.equal(norm.table, clean)
    assert norm.table.data_ptr() == at


def test_noise_goes_on_top_of_other_weights(layer):
    noise = build(layer)
    synced = SyncedNorms(layer, noise)
    norm = layer["input_layernorm"]
    base = norm.weight.data.clone()
    noise.apply(1e-2, 3)
    drawn = draw_noise(0, 3, "input_layernorm", NUM_DRAWS * K).view(NUM_DRAWS, K)
    synced.place({name: torch.full((K, 1), 0.25) for name in NAMES})
    assert torch.equal(norm.table[0], base + 0.25)
    assert torch.equal(norm.table[1:], base + 0.25 + 1e-2 * drawn)
    norm.weight.data.copy_(base + 2)  # a full sync
    noise.recapture()
    assert torch.equal(norm.table[0], base + 2)
    assert torch.equal(norm.table[1:], base + 2 + 1e-2 * drawn)


def test_norms_with_tables_stay_beside_kernels_that_start_early(layer):
    build(layer, targets=["input_layernorm"])
    use_programmatic_launch(layer, {K})
    assert [type(norm) for norm in layer.values()] == [RowRMSNorm, PDLRMSNorm]


def test_compiled_code_sees_other_rows_and_other_noise(layer):
    tables = Tables()
    noise = build(layer, tables)
    norm = layer["input_layernorm"]
    compiled = torch.compile(lambda x, y: norm(x, y)[0], fullgraph=True, dynamic=True, backend="aot_eager")
    for step, tokens in enumerate((3, 5, 2), start=1):
        x, residual = (torch.randn(tokens, K).bfloat16() for _ in range(2))
        noise.apply(1e-2, step)
        tables.ids.copy_(tables.ids.roll(1))
        with torch.no_grad():
            assert torch.equal(compiled(x, residual), norm(x, residual)[0])


def test_norms_of_other_kinds_are_refused():
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        layer = torch.nn.ModuleDict({name: GemmaRMSNorm(K) for name in NAMES})
    with pytest.raises(
        ValueError, match=r"^aqn\.draw other than batch .* input_layernorm, which is a GemmaRMSNorm .*\+aqn\.draw=batch"
    ):
        build(layer)
