import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.export.prompt_log_probs import log_prob_change
from verl_qerl.cli.prompts import tokenize
from verl_qerl.formats.reference import dequantize

CHAT = [{"role": "user", "content": "What is 5 + 3?"}]


def test_the_change_is_that_of_the_two_models(models):
    prompts = ["What is 2 + 3? Ann has 4 apples.", CHAT, "a"]
    tokens = tokenize(models / "nvfp4", prompts)
    found = log_prob_change(open_source(models / "bf16").tensors(), models / "nvfp4", tokens, "cpu")

    tokenizer = AutoTokenizer.from_pretrained(models / "bf16")
    model = AutoModelForCausalLM.from_pretrained(models / "bf16", dtype=torch.bfloat16).eval()
    texts = [prompts[0], tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)]

    def log_probs():
        found = []
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.no_grad():
                found.append(
                    -torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
                )
        return torch.cat(found)

    before = log_probs()
    for name, item in packed_stream(open_source(models / "nvfp4")):
        if not isinstance(item, torch.Tensor):
            model.get_submodule(name).weight.data = dequantize(item)
    change = log_probs() - before
    assert (found["prompts"], found["tokens"]) == (2, change.numel())
    assert found["mean_abs_change"] == pytest.approx(change.abs().mean().item(), rel=1e-4)
    assert found["max_abs_change"] == pytest.approx(change.abs().max().item(), rel=1e-4)
    assert found["mean_change"] == pytest.approx(change.mean().item(), rel=1e-3, abs=1e-6)
    assert found["mean_abs_change"] > 0.01
