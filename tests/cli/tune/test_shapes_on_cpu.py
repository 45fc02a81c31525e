"""Linears that `tune` measures, of known models and of a config.json."""

import json

import pytest

from verl_qerl.cli.tune.shapes import MODELS, shapes_of

# Of Qwen/Qwen3-4B's config.json.
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.fixture
def model(tmp_path):
    def write(**changed: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | changed))
        return str(tmp_path)

    return write


def test_known_models_are_those_of_their_configurations(model):
    assert MODELS["qwen2.5-7b"] == ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
    assert MODELS["qwen3-32b"] == ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600))
    sizes = {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64}
    assert shapes_of([model(**sizes)]) == shapes_of(["qwen3-32b"]) == sorted(MODELS["qwen3-32b"])


def test_any_model_by_its_directory_or_file(model):
    expected = [(2560, 4096), (2560, 9728), (6144, 2560), (19456, 2560)]
    folder = model()
    assert shapes_of([folder]) == shapes_of([f"{folder}/config.json"]) == expected
    assert set(shapes_of([folder, "qwen3-8b"])) == {*expected, *MODELS["qwen3-8b"]}
    # Heads of 64 columns, as in Qwen2.5-0.5B.
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    assert shapes_of([model(**sizes, head_dim=None)]) == [(896, 896), (896, 4864), (1152, 896), (9728, 896)]


def test_gpus_share_outputs_of_some_linears_and_inputs_of_the_others(model):
    assert shapes_of([model()], 2) == [(2560, 2048), (2560, 4864), (3072, 2560), (9728, 2560)]
    # Eight heads of k and v: each is on two of sixteen ranks.
    few = {"intermediate_size": 8192}
    assert shapes_of([model(**few)], 16) == [(512, 2560), (1024, 2560), (2560, 256), (2560, 512)]
    assert (1152, 3584) in shapes_of(["qwen2.5-7b"], 4)


@pytest.mark.parametrize("ranks", [0, 3, 5, 64])
def test_ranks_that_cannot_share_are_refused(model, ranks):
    with pytest.raises(ValueError, match=rf"^no such rollout: --tensor-parallel {ranks}\. .*Change --tensor-parallel"):
        shapes_of([model()], ranks)


def test_experts_are_left_out(model):
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    found = shapes_of([model(model_type="qwen3_moe", hidden_size=2048, **sizes)])
    assert found == [(2048, 4096), (6144, 2048)]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--models qwen3-5b is no model\. qwen2\.5-0\.5b.*Check the name"):
        shapes_of(["qwen3-5b"])
    with pytest.raises(ValueError, match="is no model"):
        shapes_of([str(tmp_path)])


def test_linears_that_the_kernel_does_not_take_are_left_out(model):
    assert (2560, 9720) not in shapes_of([model(intermediate_size=9720)])
    sizes = {"hidden_size": 2500, "intermediate_size": 9720}
    with pytest.raises(ValueError, match=r"^nothing to measure: the linears of .* Multiples of 64 are accepted"):
        shapes_of([model(**sizes)])
