import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import NVFP4, PackedWeight

pytest.importorskip("vllm")


def digests_of(path, scale: str = "minmax") -> dict[str, str]:
    items = packed_stream(open_source(path), NVFP4(scale=scale))
    return {name: weight_digest(item) for name, item in items if isinstance(item, PackedWeight)}


@pytest.fixture
def copy_of(model_dir, tmp_path):
    """A copy of the Qwen2 directory, its tensors given to a function that changes them."""

    def make(change) -> str:
        folder = tmp_path / "changed"
        shutil.copytree(model_dir("qwen2"), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def test_digests_are_those_of_the_stream(engine, model_dir, digests_in):
    found = digests_in(engine)
    assert len(found) == 2 * 7
    assert found == digests_of(model_dir("qwen2"))
    assert found != digests_of(model_dir("qwen2"), "mse")


def test_an_nvfp4_directory_has_the_digests_of_its_source(engine, packed_engine, packed_dir, digests_in):
    assert digests_in(packed_engine) == digests_in(engine) == digests_of(packed_dir)


def test_digests_see_the_global_scale(start, copy_of, model_dir, digests_in):
    # Twice the weight has the same codes and block scales.
    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 2

    before, after = digests_of(model_dir("qwen2"), "mse"), digests_in(start(copy_of(double)))
    assert {name for name in before if before[name] != after[name]} == {"model.layers.0.mlp.down_proj"}


def test_a_missing_tensor(start, copy_of):
    folder = copy_of(lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    expected = r"lacks 1 parameters of Qwen2ForCausalLM, first 'model\.layers\.1\.input_layernorm\.weight'\. Every .*\."
    with pytest.raises(ValueError, match=expected):
        start(folder)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "self_attn.v_proj.bias", "mlp.up_proj.weight"])
def test_a_missing_member_of_a_fused_linear(start, copy_of, name):
    # vLLM itself is content with the other members.
    folder = copy_of(lambda tensors: tensors.pop(f"model.layers.0.{name}"))
    module = name.rpartition(".")[0].replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"lacks \d parameters of Qwen2.*, first 'model\.layers\.0\.{module}"):
        start(folder)


@pytest.mark.parametrize("options", [{"scales": "minmax"}, {"scale": "minmax", "device": "cpu"}], ids=str)
def test_an_unknown_option(start, model_dir, options):
    with pytest.raises(
        ValueError, match=r"unknown model_loader_extra_config .* Accepted are \['ignore', 'scale', 'share_base'\]\."
    ):
        start(model_dir("qwen2"), model_loader_extra_config=options)


def test_share_base_is_a_switch(start, model_dir):
    with pytest.raises(ValueError, match=r"no switch: model_loader_extra_config\.share_base='yes'"):
        start(model_dir("qwen2"), model_loader_extra_config={"share_base": "yes"})


def test_an_unknown_scale_choice(start, model_dir):
    with pytest.raises(ValueError, match="unknown scale choice: scale='best'"):
        start(model_dir("qwen2"), model_loader_extra_config={"scale": "best"})


def test_a_model_that_was_loaded_otherwise_has_no_digests():
    from verl_qerl.vllm_plugin.weights.loader import base_digests

    with pytest.raises(ValueError, match=r"^Linear holds no packed weights of ours\. .* Remove your own"):
        base_digests(torch.nn.Linear(1, 1))


def test_a_weight_that_vllm_leaves_out(start, model_dir, monkeypatch):
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    load, lost = Qwen2ForCausalLM.load_weights, "model.layers.1.input_layernorm.weight"
    monkeypatch.setattr(
        Qwen2ForCausalLM,
        "load_weights",
        lambda self, weights: load(self, ((name, tensor) for name, tensor in weights if name != lost)),
    )
    with pytest.raises(ValueError, match=rf"lacks 1 parameters of Qwen2ForCausalLM, first '{lost}'"):
        start(model_dir("qwen2"))


def test_files_are_those_of_the_revision_in_the_download_folder(monkeypatch):
    from vllm.config.load import LoadConfig

    from verl_qerl.vllm_plugin import register
    from verl_qerl.vllm_plugin.weights import loader

    register()
    asked = []
    monkeypatch.setattr(loader, "open_source", lambda *source: asked.append(source))
    made = loader.QuantizingModelLoader(LoadConfig(load_format="verl_qerl_nvfp4", download_dir="/data/hub"))
    config = SimpleNamespace(model="somebody/model", revision="my-branch", runner_type="generate")
    monkeypatch.setattr(loader, "packed_stream", lambda *_: [])
    made.download_model(config)
    assert list(made._quantized(config, torch.device("cpu"), {})) == []
    assert asked == [("somebody/model", "my-branch", "/data/hub")] * 2


def test_a_model_that_speculates_is_loaded_as_vllm_does(vllm, start, packed_dir, model_dir, generate, digests_in):
    draft = {"method": "draft_model", "model": str(model_dir("qwen2")), "num_speculative_tokens": 2}
    engine = start(packed_dir, speculative_config=draft)
    assert digests_in(engine) == digests_of(packed_dir)
    steps, _ = generate(engine)
    assert len(steps) == 4


@pytest.mark.parametrize(
    ("runner", "quantization", "ours"),
    [
        ("generate", "verl_qerl_nvfp4", True),
        ("draft", "verl_qerl_nvfp4", True),
        ("generate", None, True),
        ("draft", None, False),
        ("draft", "fp8", False),
    ],
)
def test_which_models_are_ours_to_load(monkeypatch, runner, quantization, ours):
    """A model that is sampled from without our quantization is a mistake, which our loader tells."""
    from vllm.config.load import LoadConfig

    from verl_qerl.vllm_plugin import register
    from verl_qerl.vllm_plugin.weights import loader

    register()
    taken = []
    monkeypatch.setattr(loader, "open_source", lambda *_: taken.append("ours"))
    monkeypatch.setattr(loader.DefaultModelLoader, "download_model", lambda *_: taken.append("vLLM's"))
    options = {"load_format": "verl_qerl_nvfp4", "model_loader_extra_config": {"scale": "minmax"}}
    config = SimpleNamespace(model="somebody/model", revision=None, runner_type=runner, quantization=quantization)
    loader.QuantizingModelLoader(LoadConfig(**options)).download_model(config)
    assert taken == ["ours" if ours else "vLLM's"]
