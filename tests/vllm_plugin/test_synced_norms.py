"""Norms that a sync brings, under CUDA graphs and in sleep mode, which only a GPU has."""

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from vllm import LLM, SamplingParams
from verl_qerl.nvfp4.checkpoint import quantization_config

def main():
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.02,
              kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True,
              load_format="verl_qerl_nvfp4", quantization="verl_qerl_nvfp4", enable_sleep_mode=True,
              hf_overrides={"quantization_config": quantization_config()},
              worker_extension_cls="verl_qerl.vllm_plugin.worker.NoiseWorkerExtension",
              additional_config={"verl_qerl": {"train_norms": True, "aqn": {"enabled": True}}})
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)

    def decode():
        assert llm.reset_prefix_cache()  # a cached prefill rounds in other places
        out = llm.generate([{"prompt_token_ids": [(7 * i + 3) % 1000 for i in range(200)]}], params, use_tqdm=False)[0]
        return [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]

    def noise(sigma, step):
        return llm.collective_rpc("qerl_set_noise", args=(sigma, step))[0]

    def norms():
        return llm.collective_rpc("qerl_norm_weights")[0]

    def sync(size):
        def place(worker):
            held = worker._qerl_norms
            generator = torch.Generator().manual_seed(0)
            shifts = {
                name: (torch.randn(one.numel(), 1, generator=generator) * size).to(worker.device, torch.bfloat16)
                for name, one in sorted(held._base.items())
            }
            held.check(shifts)
            held.place(shifts)
            return len(shifts)
        return llm.collective_rpc(place)[0]

    def same(a, b):
        return all(torch.equal(a[name], b[name]) for name in a)

    clean, clean_norms = decode(), norms()
    seen = {"num_norms": sync(1e-3)}
    seen["small_change_acts"] = decode() != clean
    sync(0.1)
    trained, trained_norms = decode(), norms()
    seen["change_acts"] = trained != clean and not same(trained_norms, clean_norms)
    noise(1e-2, 2)
    noisy = decode()
    seen["noise_on_top_acts"] = noisy != trained
    llm.sleep(level=1)
    noise(1e-2, 2)
    llm.wake_up(tags=["weights"])
    sync(0.1)  # as verl syncs
    llm.wake_up(tags=["kv_cache"])
    seen["the_sync_keeps_the_noise"] = decode() == noisy
    noise(0.0, 0)
    seen["trained_norms_come_back"] = decode() == trained and same(norms(), trained_norms)
    sync(0.0)
    seen["the_base_comes_back"] = decode() == clean and same(norms(), clean_norms)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def test_synced_norms_act_under_cuda_graphs_and_survive_sleep(random_qwen2, run_script):
    seen = run_script(SCRIPT, str(random_qwen2))
    assert seen.pop("num_norms") == 8
    assert all(seen.values()), seen
