"""Stock vLLM, without our plugin, loads what `quantize` writes and computes with the same bits as our loader."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM has no NVFP4 on a CPU")]

SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.15, enforce_eager=True,
              skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    ids = [(7 * i + 3) % 1000 for i in range(300)]
    out = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    log_probs = [next(iter(entry.values())).logprob for entry in out.prompt_logprobs[1:]]
    print("RESULT", json.dumps([llm.llm_engine.model_config.quantization, log_probs, list(out.outputs[0].token_ids)]))
"""


def answer(script, model, options: dict, plugins: str | None) -> list:
    env = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    env |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    command = [sys.executable, str(script), str(model), json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_stock_vllm_computes_the_same_as_our_loader(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl_qerl.cli import main
    from verl_qerl.nvfp4.checkpoint import quantization_config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "bf16")
    assert main(["quantize", "--model", str(tmp_path / "bf16"), "--out", str(tmp_path / "nvfp4")]) == 0
    script = tmp_path / "ask.py"
    script.write_text(SCRIPT)
    ours = {"load_format": "verl_qerl_nvfp4", "quantization": "verl_qerl_nvfp4"}
    ours["hf_overrides"] = {"quantization_config": quantization_config()}
    method, log_probs, tokens = answer(script, tmp_path / "nvfp4", {}, plugins="none")
    our_method, our_log_probs, our_tokens = answer(script, tmp_path / "bf16", ours, plugins=None)
    assert (method, our_method) == ("compressed-tensors", "verl_qerl_nvfp4")
    assert log_probs == our_log_probs
    assert tokens == our_tokens
