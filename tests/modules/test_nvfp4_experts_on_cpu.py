"""Packed experts against those of transformers with the dequantized weights."""

import pytest
import torch
from qerl_testing import assert_close, quantize, random_packed_weight, random_qwen3_moe, set_linear

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.ignore import is_packed_module
from verl_qerl.formats.reference import dequantize
from verl_qerl.modules.convert import packed_linears, packed_weights, replace_experts, replace_linears
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.nvfp4_experts import ExpertLinear, NVFP4Experts, PackedStack

pytest.importorskip("transformers")
TOKENS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    random_qwen3_moe().save_pretrained(folder)
    return open_source(folder)


def build(source, dtype):
    """(packed model, the same with dense weights), both of `dtype`."""
    packed, dense = random_qwen3_moe(), random_qwen3_moe()
    places = {**replace_linears(packed, lambda name: is_packed_module(name, ())), **replace_experts(packed)}
    for name, item in packed_stream(source):
        if isinstance(item, PackedWeight):
            places.pop(name).fill(item)
            set_linear(dense, name, dequantize(item))
    assert not places
    return packed.to(dtype), dense.to(dtype)


def passes(model, implementation: str = "grouped_mm"):
    """(logits, gradient of the embedded tokens)."""
    model.config._experts_implementation = implementation
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    logits.float().square().mean().backward()
    return logits.detach(), embedded.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_gradient_are_those_of_grouped_mm_to_the_bit(source, dtype):
    packed, dense = build(source, dtype)
    for found, expected in zip(passes(packed), passes(dense), strict=True):
        assert torch.equal(found, expected)
        assert expected.abs().max() > 0


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_differ_by_rounding(source, implementation):
    packed, dense = build(source, torch.float32)
    for found, expected in zip(passes(packed), passes(dense, implementation), strict=True):
        assert_close(found, expected, 1e-6)


def test_the_comparison_sees_one_expert(source):
    packed, dense = build(source, torch.float32)
    experts = packed.model.layers[1].mlp.experts
    experts.down.codes[2, 5, 7] ^= 1
    assert not torch.equal(passes(packed)[0], passes(dense)[0])


def test_autocast(source):
    packed, dense = build(source, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = passes(packed)
    for one, other in zip(found, passes(dense), strict=True):
        assert_close(one.float(), other.float(), 0.05)
    assert found[0].dtype == torch.bfloat16


def test_gradient_checkpointing_changes_nothing(source):
    packed, _ = build(source, torch.float32)
    expected = passes(packed)
    packed.train()
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for found, without in zip(passes(packed), expected, strict=True):
        assert torch.equal(found, without)


def test_a_batch_may_leave_experts_without_tokens():
    experts = NVFP4Experts(8, 32, 16, torch.nn.SiLU(), "cpu")
    weights = {name: quantize(torch.randn(place.out_features, place.in_features)) for name, place in experts.linears()}
    for name, place in experts.linears():
        place.fill(weights[name])
    x = torch.randn(3, 32)
    found = experts(x, torch.tensor([[6, 1], [1, 6], [6, 1]]), torch.tensor([[0.25, 0.75]] * 3))
    dense = {name: dequantize(weight, torch.float32) for name, weight in weights.items()}

    def one(e: int, row: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(row @ dense[f"{e}.gate_proj"].T) * (row @ dense[f"{e}.up_proj"].T)
        return hidden @ dense[f"{e}.down_proj"].T

    pairs = [(6, 1), (1, 6), (6, 1)]
    expected = torch.stack([0.25 * one(a, row) + 0.75 * one(b, row) for row, (a, b) in zip(x, pairs, strict=True)])
    assert_close(found, expected, 1e-6)


def test_no_tokens():
    x = torch.zeros(0, 32, requires_grad=True)
    found = NVFP4Experts(8, 32, 16, torch.nn.SiLU(), "cpu")(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    found.sum().backward()
    assert found.shape == x.grad.shape == x.shape


def test_no_dense_expert_and_no_parameter_is_left(source):
    packed, _ = build(source, torch.bfloat16)
    experts = packed.model.layers[1].mlp.experts
    assert isinstance(experts, NVFP4Experts)
    assert list(experts.parameters()) == []
    assert {buffer.dtype for buffer in experts.buffers()} == {torch.uint8}
    assert not [name for name in packed.state_dict() if ".experts." in name]  # a checkpoint names the base
    assert isinstance(packed.model.layers[0].mlp.gate_proj, NVFP4Linear)  # the dense layer
    assert type(packed.model.layers[1].mlp.gate).__name__ == "Qwen3MoeTopKRouter"


def test_packed_weights_are_named_and_digested_as_the_checkpoint(source):
    peft = pytest.importorskip("peft")
    packed, _ = build(source, torch.bfloat16)
    expected = {name: weight_digest(item) for name, item in packed_stream(source) if isinstance(item, PackedWeight)}
    assert {name: weight_digest(weight) for name, weight in packed_weights(packed)} == expected
    wrapped = peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj", "o_proj"]))
    assert {name: weight_digest(weight) for name, weight in packed_weights(wrapped)} == expected
    assert len(dict(packed_linears(wrapped))) == len(expected) - 4 * 3


@pytest.mark.parametrize("stack", ["gate_up", "down"])
@pytest.mark.parametrize("part", ["codes", "scale", "decode_scale"])
def test_one_byte_of_any_tensor_shows_in_one_digest(source, stack, part):
    packed, _ = build(source, torch.bfloat16)
    before = {name: weight_digest(weight) for name, weight in packed_weights(packed)}
    tensor = getattr(getattr(packed.model.layers[1].mlp.experts, stack), part)
    tensor.view(-1)[-1] ^= 1
    after = {name: weight_digest(weight) for name, weight in packed_weights(packed)}
    last = "model.layers.1.mlp.experts.3." + {"gate_up": "up_proj", "down": "down_proj"}[stack]
    assert [name for name in before if before[name] != after[name]] == [last]


def test_a_stack_is_filled_where_its_first_weight_is():
    stack = PackedStack(2, 32, 64, "meta")
    weights = [random_packed_weight(32, 64, seed) for seed in range(2)]
    places = [ExpertLinear(stack, g) for g in range(2)]
    for g in (1, 0):
        places[g].fill(weights[g])
    assert not stack.codes.is_meta
    assert [weight_digest(place.packed()) for place in places] == [weight_digest(weight) for weight in weights]


def test_a_size_that_blocks_do_not_divide():
    with pytest.raises(ValueError, match=r"^in_features=40 of experts is not a multiple of 16\. NVFP4 cannot hold"):
        replace_experts(random_qwen3_moe(moe_intermediate_size=40))


def test_a_model_without_experts_has_none(tiny_model):
    assert replace_experts(tiny_model()) == {}
