import pytest

from verl_qerl.formats.ignore import ignored_modules, is_ignored, linears_in


def test_ignored_modules_come_from_either_layout() -> None:
    assert ignored_modules({}) == ("lm_head",)
    assert ignored_modules({"quantization_config": {"ignore": ["a", "re:b"]}}) == ("a", "re:b")
    assert ignored_modules({"quantization_config": {"exclude_modules": ["lm_head", "c"]}}) == ("lm_head", "c")


@pytest.mark.parametrize("named", [3, "lm_head", [1]])
def test_modules_of_another_kind_are_refused(named: object) -> None:
    with pytest.raises(ValueError, match=r"^no list of modules: ignore in config\.json="):
        ignored_modules({"quantization_config": {"ignore": named}})


@pytest.mark.parametrize(
    ("module", "rule", "ignored"),
    [
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.mlp.up_proj", "model.layers.1", False),
        ("model.layers.1.mlp.up_proj", "up_proj", False),
        ("model.layers.1.mlp.up_proj", r"re:.*up_proj$", True),
        ("model.layers.1.mlp.up_proj", r"re:up_proj", False),
        ("model.layers.11.mlp.up_proj", r"re:model\.layers\.1\.", False),
    ],
)
def test_ignore_rules(module: str, rule: str, ignored: bool) -> None:
    assert is_ignored(module, ["another", rule]) is ignored


def test_a_rule_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no regular expression: 're:\[' of `ignore` \(unterminated character set"):
        is_ignored("model.layers.1.mlp.up_proj", ["re:["])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 32), True),
        ("layers.0.mlp.up_proj.weight", (64, 32), True),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.input_layernorm.weight", (32,), False),
        ("model.layers.0.self_attn.q_norm.weight", (4, 32), False),  # Cohere's
        ("model.layers.0.self_attn.q_proj.weight_scale", (64, 2), False),
        ("model.embed_tokens.weight", (256, 32), False),
        ("lm_head.weight", (256, 32), False),
        ("model.layers.0.mlp.down_proj.weight", (32, 64), False),  # ignored below
    ],
)
def test_only_matrices_inside_layers_are_replaced(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert linears_in({name: shape}, ["re:.*down_proj"]) == ({name.removesuffix(".weight"): shape} if expected else {})
