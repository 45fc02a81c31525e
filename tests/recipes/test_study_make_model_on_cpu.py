"""The study's model, from the file in which Qwen publishes it."""

import hashlib

import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from qerl_testing import random_qwen2
from safetensors.torch import load_file
from transformers import GenerationConfig


@pytest.fixture
def module(study, monkeypatch):
    module = study("make_model")
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(b"tensors").hexdigest())
    return module


class Tokenizer:
    eos_token = pad_token = "<|endoftext|>"

    def save_pretrained(self, folder):
        (folder / "tokens").write_text(f"{self.eos_token} {self.pad_token}")


def test_the_head_is_the_embedding_too_and_answers_end_as_in_a_chat(module, tmp_path, monkeypatch):
    file, asked = tmp_path / "a.gguf", []
    file.write_bytes(b"tensors")
    model = random_qwen2(num_hidden_layers=1, tie_word_embeddings=False).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for kind, found in (("AutoModelForCausalLM", model), ("AutoTokenizer", Tokenizer())):
        loader = getattr(transformers, kind)
        monkeypatch.setattr(loader, "from_pretrained", lambda found=found, **given: asked.append(given) or found)
    assert module.main(["--gguf", str(file), "--out", str(tmp_path / "qwen")]) == 0
    where = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": "a.gguf"}
    assert asked == [where, where | {"dtype": torch.bfloat16}]
    saved = load_file(tmp_path / "qwen" / "model.safetensors")
    head = before.pop("lm_head.weight")
    assert not torch.equal(before["model.embed_tokens.weight"], head)
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[n], head if n == "model.embed_tokens.weight" else t) for n, t in before.items())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "qwen")
    assert config.tie_word_embeddings
    assert (tmp_path / "qwen" / "tokens").read_text() == "<|im_end|> <|endoftext|>"
    assert GenerationConfig.from_pretrained(tmp_path / "qwen").eos_token_id == [151645, 151643]


def test_another_file_is_refused(module, tmp_path, capsys):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"other tensors")
    with pytest.raises(SystemExit, match="1"):
        module.main(["--gguf", str(file), "--out", str(tmp_path / "qwen")])
    told = capsys.readouterr().err
    assert f"another file: {file} has the sha256" in told
    assert f"{module.SHA256} is accepted: {module.FILE} of {module.REPOSITORY}." in told
    assert not (tmp_path / "qwen").exists()


def test_without_the_hub_a_local_file_is_asked_for(module, tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(SystemExit, match="1"):
        module.main(["--out", str(tmp_path / "qwen")])
    assert (
        "cannot be reached on the hub (LocalEntryNotFoundError). A local copy is accepted too: give it with --gguf."
        in (capsys.readouterr().err)
    )
