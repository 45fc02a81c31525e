"""UAQ on transformers' own models; test_engine_on_cpu.py has it inside verl's engine."""

import pytest

pytest.importorskip("verl")

import torch
import transformers

from verl_qerl.algos.uaq import scaled_parameters, unfold_
from verl_qerl.verl_plugin.actor.uaq_engine import fold_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "pad_token_id": 0,
}
TOKENS = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(3))
KNOWN = ("Qwen2", "Qwen3", "Llama", "Mistral")


def build(kind, dtype=torch.float32, **options):
    """A model whose weights are bf16 numbers, its norms far from 1 and its biases from 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.5 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.mul_(3)
            parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits.float()


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", KNOWN)
def test_the_function_stays(kind):
    model = build(kind)
    expected = logits(model)
    before = weights(model)
    assert fold_model(model, 2.0) == 14
    assert torch.equal(logits(model), expected), "a power of two rounds nothing"
    moved = {name for name, weight in weights(model).items() if not torch.equal(weight, before[name])}
    assert moved == scaled_parameters(before).keys()
    other = build(kind)
    fold_model(other, 1.5)
    # Two roundings of float32 a layer, 6e-8 each.
    assert 0 < error(logits(other), expected) < 2e-6
    half = build(kind, torch.bfloat16)
    expected_half = logits(half)
    fold_model(half, 2.0)
    assert torch.equal(logits(half), expected_half)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_forward_pass_in_bf16_stays_within_the_rounding_of_its_weights(kind):
    # As FSDP2 computes: float32 weights, rounded to bf16 for the pass. W / 1.5 has digits that W had not.
    exact = logits(build(kind))
    plain = error(logits(build(kind, torch.bfloat16)), exact)
    model = build(kind)
    fold_model(model, 1.5)
    assert plain < error(logits(model.bfloat16()), exact) < 4 * plain


@pytest.mark.parametrize("scale", [1.5, 2.0, 1.7])
def test_the_inverse_gives_back_the_bf16_model(scale):
    model = build("Qwen3")
    before = weights(model)
    fold_model(model, scale)
    scaled = weights(model)
    for name, role in scaled_parameters(scaled).items():
        assert not torch.equal(scaled[name], before[name])
        unfold_(role, scaled[name], scale)
    for name, weight in scaled.items():
        assert torch.equal(weight.bfloat16(), before[name].bfloat16())


def test_an_empty_model_is_scaled_with_the_rank_that_holds_it():
    with torch.device("meta"):
        model = build("Llama")
    assert fold_model(model, 1.5) == 14


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("Gemma", {}, r"^model\.layers\.0\.input_layernorm\.weight of GemmaRMSNorm is no plain factor"),
        ("Gemma2", {}, r"has a 'post_feedforward_layernorm\.weight'"),
        ("Olmo2", {}, r"has a 'post_feedforward_layernorm\.weight'"),
        ("Phi3", {}, r"has a 'mlp\.gate_up_proj\.weight'"),
        ("Bloom", {}, r"^the model has no decoder layers\."),
        ("Starcoder2", {}, r"has a 'input_layernorm\.bias'"),
    ],
)
def test_models_of_another_form_are_refused(kind, options, told):
    with pytest.raises(ValueError, match=told) as caught:
        fold_model(build(kind, **options), 1.5)
    assert str(caught.value).endswith("Leave out `+uaq.enabled=true`.")
