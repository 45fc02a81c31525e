"""The head without FSDP2 and PEFT; with them: test_engine_on_cpu.py."""

import pytest

pytest.importorskip("verl")

import torch
import torch.nn as nn
from qerl_testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_qerl.verl_plugin.actor.chunked_head import ChunkedHead, install_chunked_head

IDS = torch.arange(24).reshape(2, 12)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_attention_heads=2, num_key_value_heads=1)).requires_grad_(False)
    install_chunked_head(model, "torch")
    return model


def test_log_probs_of_the_next_tokens(model):
    log_p = (model(input_ids=IDS).logits / 0.5).log_softmax(-1)
    out = model(input_ids=IDS, temperature=0.5, calculate_entropy=True, return_dict=True, labels=None)
    assert_close(out.log_probs, log_p.gather(-1, IDS.roll(-1, -1)[..., None])[..., 0], 1e-6)
    assert_close(out.entropy, -(log_p.exp() * log_p).sum(-1), 1e-5)
    assert out.logits is None


def test_labels_that_are_given(model):
    labels = torch.full_like(IDS, 5)
    log_p = model(input_ids=IDS).logits.log_softmax(-1)
    assert_close(model(input_ids=IDS, temperature=1, shift_labels=labels).log_probs, log_p[..., 5], 1e-6)


def test_autocast_decides_the_dtype(model):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=IDS, temperature=1.0)
        log_p = model(input_ids=IDS).logits.float().log_softmax(-1)
    assert out.log_probs.dtype == torch.float32
    assert_close(out.log_probs, log_p.gather(-1, IDS.roll(-1, -1)[..., None])[..., 0], 1e-6)


def test_the_model_is_what_it_was_to_others(model):
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert isinstance(model, Qwen2ForCausalLM)
    assert isinstance(model.lm_head, ChunkedHead)
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.parametrize("backend", ["triton", "liger"])
def test_other_backends_are_refused(backend):
    with pytest.raises(ValueError, match=rf"impl_backend={backend} is not supported .* Accepted is torch\."):
        install_chunked_head(nn.Module(), backend)


@pytest.mark.parametrize(
    ("name", "value"), [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0), ("logit_scale", 0.0625)]
)
def test_logits_that_the_model_changes_are_refused(name, value):
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_attention_heads=2, num_key_value_heads=1)).requires_grad_(False)
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=rf"^Qwen2ForCausalLM changes its logits \({name}={value}\): .*kernels=False"):
        install_chunked_head(model, None)
    setattr(model.config, name, None if name == "final_logit_softcapping" else 1.0)
    install_chunked_head(model, None)


@pytest.mark.parametrize("head", [nn.Identity(), nn.Linear(4, 4)], ids=["another", "bias"])
def test_another_head_is_refused(head):
    model = nn.Module()
    model.model, model.lm_head = nn.Identity(), head
    with pytest.raises(ValueError, match=r"^Module has no plain lm_head: .*use_fused_kernels=False"):
        install_chunked_head(model, "torch")
    assert type(model.lm_head) is type(head)
