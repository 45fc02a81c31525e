"""The engine of the scripts in test_worker.py and test_synced_norms.py: CUDA graphs, sleep mode, no other process."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from qerl_testing import float32_norms
from vllm import LLM, SamplingParams

from verl_qerl.formats import NVFP4


def start(model, additional, **options):
    """An engine over a bf16 directory, which it quantizes; `additional` are options of ours."""
    return LLM(
        model,
        dtype="bfloat16",
        max_model_len=options.pop("max_model_len", 512),
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=1 << 30,
        skip_tokenizer_init=True,
        load_format="verl_qerl_nvfp4",
        quantization="verl_qerl_nvfp4",
        enable_sleep_mode=True,
        hf_overrides={"quantization_config": NVFP4().config()},
        worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
        additional_config={"verl_qerl": additional},
        **options,
    )


def decode(llm, request=None):
    """Log-probs of a prompt's 200 tokens but the first, and of 16 greedy ones."""
    assert llm.reset_prefix_cache()  # a cached prefill rounds in other places
    params = SamplingParams(
        temperature=0, max_tokens=16, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    tokens = [(7 * i + 3) % 1000 for i in range(200)]
    out = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False, lora_request=request)[0]
    scored = [entry[token].logprob for token, entry in zip(tokens[1:], out.prompt_logprobs[1:], strict=True)]
    return scored + [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]


def noise(llm, sigma, step):
    return llm.collective_rpc("qerl_set_noise", args=(sigma, step))[0][0]


def norms(llm):
    return llm.collective_rpc(float32_norms)[0]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)
