"""Batches of up to 256 sequences with an adapter, X A^T made by norms and activations: log-probs as when read."""

import json

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from verl_qerl.nvfp4.checkpoint import quantization_config
from verl_qerl.vllm_plugin import low_ops

made = []
for name in ("add_rms_norm_low", "silu_mul_low"):
    real = getattr(low_ops, name)
    setattr(low_ops, name, lambda *args, real=real, name=name: made.append(name) or real(*args))

def main(path, adapter, options):
    llm = LLM(path, dtype="bfloat16", max_model_len=256, max_num_seqs=256, skip_tokenizer_init=True, seed=1,
              gpu_memory_utilization=0.02, kv_cache_memory_bytes=2 << 30, logprobs_mode="processed_logprobs",
              load_format="verl_qerl_nvfp4", quantization="verl_qerl_nvfp4",
              hf_overrides={"quantization_config": quantization_config()}, enable_lora=True, max_lora_rank=16,
              worker_extension_cls="verl_qerl.vllm_plugin.worker.NoiseWorkerExtension",
              additional_config={"verl_qerl": options})
    request = LoRARequest("one", 1, adapter)
    prompts = [{"prompt_token_ids": [(7 * i + 31 * j) % 1000 for i in range(20 + j % 50)]} for j in range(256)]
    params = [SamplingParams(max_tokens=8 + j % 64, logprobs=0, ignore_eos=True, detokenize=False) for j in range(256)]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
    again = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    whole = [{"prompt_token_ids": prompt["prompt_token_ids"] + list(one.outputs[0].token_ids)}
             for prompt, one in zip(prompts, outputs)]
    apart = []
    for prompt, one, read in zip(prompts, outputs, llm.generate(whole, again, use_tqdm=False, lora_request=request)):
        first = len(prompt["prompt_token_ids"])
        for token, drawn, entry in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, read.prompt_logprobs[first:]):
            apart.append(abs(drawn[token].logprob - entry[token].logprob))
    print("RESULT", json.dumps({"made": sorted(set(made)), "largest": max(apart), "mean": sum(apart) / len(apart)}))

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
"""


@pytest.mark.parametrize("least", [0, 1, 65])
def test_an_engine(run_script, random_qwen2, random_adapter, least):
    found = run_script(SCRIPT, str(random_qwen2), str(random_adapter(3)), json.dumps({"fuse_shrink": least}))
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert found["made"] == (["add_rms_norm_low", "silu_mul_low"] if least and hopper else [])
    assert found["mean"] < 0.02
    assert found["largest"] < 1.0
