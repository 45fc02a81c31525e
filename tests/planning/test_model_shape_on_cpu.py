import pytest
import torch
from qerl_testing import random_decoder, random_qwen3_moe

from verl_qerl.checkpoints.source import open_source
from verl_qerl.formats.ignore import ROUTER
from verl_qerl.planning.model_shape import ModelShape

CONFIG_7B = {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
CONFIG_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4}
# Qwen3-30B-A3B
CONFIG_30B = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
CONFIG_30B |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "model_type": "qwen3_moe"}
CONFIG_30B |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []}


def test_sizes_of_a_model():
    shape = ModelShape.from_config(CONFIG_7B)
    assert shape.linears == ((3584, 3584), (512, 3584), (512, 3584), (3584, 3584), *[(18944, 3584)] * 2, (3584, 18944))
    # Qwen2.5-7B has 7.6 B parameters, of them 1.09 B in the embedding and in the head each.
    assert shape.packed_weights == shape.layers * shape.layer_weights == pytest.approx(6.53e9, rel=1e-3)
    assert shape.head_weights == 2 * 152_064 * 3584
    assert shape.decoded_weights == shape.layer_weights
    assert shape.largest_linear == 18944 * 3584
    assert ModelShape.from_config(CONFIG_7B | {"tie_word_embeddings": True}).head_weights == 152_064 * 3584
    assert ModelShape.from_config(CONFIG_7B | {"head_dim": 64}).query == 28 * 64


def test_sizes_of_a_mixture():
    shape = ModelShape.from_config(CONFIG_30B)
    assert shape.packed_weights + shape.head_weights == pytest.approx(30.5e9, rel=2e-3)
    gates = 128 * 2 * 768 * 2048
    assert shape.largest_linear == gates
    assert shape.decoded_weights == gates + 2 * (4096 + 512) * 2048
    assert shape.adapted_features == 48 * (2 * (4096 + 2048) + 2 * (512 + 2048))
    assert len(ModelShape.from_config(CONFIG_30B | {"mlp_only_layers": [0], "decoder_sparse_step": 2}).sparse) == 24
    dense = ModelShape.from_config(CONFIG_30B | {"mlp_only_layers": list(range(48))})
    assert (dense.experts, dense.packed_weights) == (0, 48 * dense.layer_weights)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [({**CONFIG_7B, "num_experts": 8, "model_type": "mixtral"}, "it is a mixture of experts with model_type=mixtral"),
     ({**CONFIG_7B, "vision_config": {"depth": 32}}, "its config.json has vision_config, and .* Models of text alone"),
     ({"hidden_size": 8}, "its config.json has no size as intermediate_size, num_hidden_layers"),
     ({**CONFIG_7B, "hidden_size": "8"}, "its config.json has no size as hidden_size"),
     ({**CONFIG_7B, "hidden_size": 8}, "its config.json has 28 attention heads and hidden_size=8"),
     ({**CONFIG_7B, "vocab_size": -1}, "its config.json has no size as vocab_size"),
     ({**CONFIG_7B, "num_key_value_heads": [4]}, "its config.json has no size as num_key_value_heads"),
     ({**CONFIG_30B, "num_experts": None}, "its config.json has no size as num_experts"),
     ({**CONFIG_30B, "decoder_sparse_step": "1"}, "its config.json has no size as decoder_sparse_step")],
    ids=["family", "sees", "missing", "text", "heads", "negative", "list", "missing of experts", "step"],
)  # fmt: skip
def test_a_model_without_a_plan(config, sentence):
    with pytest.raises(ValueError, match=f"^no plan for this model: {sentence}"):
        ModelShape.from_config(config)


@pytest.fixture
def mixture():
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 768}
    sizes |= {"moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    return random_qwen3_moe(**sizes, vocab_size=128, attn_implementation="sdpa").requires_grad_(False)


def test_weights_are_those_that_transformers_has(mixture):
    shape = ModelShape.from_config(mixture.config.to_dict())
    left = ("embed", "lm_head", ".gate.weight")
    sizes = [p.numel() for name, p in mixture.named_parameters() if p.ndim > 1 and not any(x in name for x in left)]
    assert shape.packed_weights == sum(sizes)
    assert len(shape.sparse) == 1


def test_names_are_those_of_a_checkpoint(mixture, tmp_path):
    fused = [random_decoder(family, pad_token_id=0) for family in ("phi3", "glm", "glm4")]
    for model in (mixture, *fused):
        folder = tmp_path / model.config.model_type
        model.save_pretrained(folder)
        specs = open_source(folder).specs
        expected = {name.removesuffix(".weight"): spec.shape for name, spec in specs.items() if len(spec.shape) == 2}
        expected.pop("lm_head", None)
        assert ModelShape.from_config(model.config.to_dict()).modules() == expected


@pytest.mark.parametrize("family", ["starcoder2", "gpt_neox", "phi"])
def test_an_mlp_without_a_gate_is_not_counted_as_one_with(family):
    with pytest.raises(ValueError, match=f"^no plan for this model: the MLP of model_type={family} has no gate"):
        ModelShape.from_config(CONFIG_7B | {"model_type": family})


def test_a_fused_linear_carries_one_adapter():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    mlp = 192 + 64 + 64 + 96
    for family, attention in (("phi3", 128 + 64 + 64 + 64), ("glm", 64 + 64 + 2 * (32 + 64) + 64 + 64)):
        assert ModelShape.from_config(config | {"model_type": family}).adapted_features == 2 * (attention + mlp)


def test_what_rules_leave_in_bf16():
    shape = ModelShape.from_config(CONFIG_7B)
    mlp, o, q = 3 * 18944 * 3584, 3584 * 3584, 3584 * 3584
    assert shape.left_in_bf16(("lm_head",)) == [0] * 28
    assert shape.left_in_bf16(("re:.*mlp.*", "model.layers.1.self_attn.o_proj")) == [mlp, mlp + o, *[mlp] * 26]
    assert shape.left_in_bf16(("re:.*layers.*",)) == [shape.layer_weights] * 28
    mixed = ModelShape.from_config(CONFIG_30B | {"mlp_only_layers": [1]})
    found = mixed.left_in_bf16((ROUTER, r"re:.*\.mlp\.down_proj$", "model.layers.2.self_attn.o_proj"))
    assert found == [0, 6144 * 2048, 4096 * 2048, *[0] * 45]
    phi3 = ModelShape.from_config(CONFIG_7B | {"model_type": "phi3"})
    assert phi3.left_in_bf16((r"re:.*\.qkv_proj$",)) == [q + 2 * 512 * 3584] * 28


@pytest.mark.parametrize("index", [0, 1], ids=["dense", "experts"])
def test_what_a_layer_saves_is_most_of_the_estimate(mixture, index):
    """The rest is what backward and adapters need besides: the plans of whole steps are compared with measured ones."""
    from verl_qerl.modules.nvfp4_experts import NVFP4Experts

    layer, tokens, held = mixture.model.layers[index], 256, {}
    if index:
        layer.mlp.experts = NVFP4Experts.from_experts(layer.mlp.experts)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(1, tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    positions = mixture.model.rotary_emb(x, torch.arange(tokens)[None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = layer(x, position_embeddings=positions, attention_mask=None)
    saved = sum(size for place, size in held.items() if place not in weights)
    estimate = ModelShape.from_config(mixture.config.to_dict()).saved_bytes()[index] * tokens
    assert 0.6 < saved / estimate < 0.8
