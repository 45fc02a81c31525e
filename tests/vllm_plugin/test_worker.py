"""Noise and adapters under CUDA graphs and in sleep mode, which only a GPU has."""

import json

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
              additional_config={"verl_qerl": {"aqn": {"enabled": True}}})
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)

    def decode():
        assert llm.reset_prefix_cache()  # a cached prefill rounds in other places
        out = llm.generate([{"prompt_token_ids": [(7 * i + 3) % 1000 for i in range(200)]}], params, use_tqdm=False)[0]
        return [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]

    def noise(sigma, step):
        return llm.collective_rpc("qerl_set_noise", args=(sigma, step))[0]

    def norms():
        return llm.collective_rpc("qerl_norm_weights")[0]

    def kinds(worker):
        names = [type(module).__name__ for module in worker.model_runner.get_model().modules()]
        return names.count("EarlyRMSNorm"), names.count("EarlySiluAndMul")

    def same(a, b):
        return all(torch.equal(a[name], b[name]) for name in a)

    clean, clean_norms = decode(), norms()
    seen = {"repeats": decode() == clean, "num_norms": noise(5e-4, 1)}
    hopper = torch.cuda.get_device_capability() == (9, 0)
    seen["own_norms"] = llm.collective_rpc(kinds)[0] == ((9, 4) if hopper else (0, 0))
    seen["small_sigma_acts"] = decode() != clean
    noise(1e-2, 2)
    noisy, noisy_norms = decode(), norms()
    seen["sigma_acts"] = noisy != clean
    llm.sleep(level=1)
    noise(0.0, 0)
    llm.wake_up()
    seen["restored_while_asleep"] = decode() == clean and same(norms(), clean_norms)
    noise(1e-2, 2)
    seen["same_draw_again"] = decode() == noisy and same(norms(), noisy_norms)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def test_noise_acts_under_cuda_graphs_and_is_undone_while_asleep(random_qwen2, run_script):
    seen = run_script(SCRIPT, str(random_qwen2))
    assert seen.pop("num_norms") == 8
    assert all(seen.values()), seen


ADAPTERS = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.lora.request import LoRARequest
from verl_qerl.nvfp4.checkpoint import quantization_config
from verl_qerl.vllm_plugin.adapter import flatten, place_adapter

def main():
    model, one, two, options = sys.argv[1:]
    llm = LLM(model, dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.02,
              kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True,
              load_format="verl_qerl_nvfp4", quantization="verl_qerl_nvfp4", enable_sleep_mode=True, enable_lora=True,
              max_loras=1, max_lora_rank=16, hf_overrides={"quantization_config": quantization_config()},
              worker_extension_cls="verl_qerl.vllm_plugin.worker.NoiseWorkerExtension",
              additional_config={"verl_qerl": json.loads(options)})
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, prompt_logprobs=0, ignore_eos=True,
                            detokenize=False)
    tokens = [(7 * i + 3) % 1000 for i in range(200)]

    def decode(request=None):
        assert llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False, lora_request=request)[0]
        scored = [entry[token].logprob for token, entry in zip(tokens[1:], out.prompt_logprobs[1:], strict=True)]
        return scored, [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]

    def same(a, b):
        # vLLM's kernels for adapters add in the order in which they come; what is sampled then soon differs.
        stock = json.loads(options).get("lora") == "stock"
        return all(abs(x - y) < 0.02 for x, y in zip(a[0], b[0])) if stock else a == b

    def place(folder):
        def put(worker):
            manager = worker.model_runner.lora_manager._adapter_manager
            saved = load_file(folder + "/adapter_model.safetensors")
            tensors = {name: tensor.to(worker.device) for name, tensor in saved.items()}
            config = json.load(open(folder + "/adapter_config.json"))
            return place_adapter(manager, 123, *flatten(tensors, manager.lora_config.lora_dtype), config)
        return llm.collective_rpc(put)[0]

    fresh = LoRARequest("fresh", 7, two)
    expected, base = decode(fresh), decode()
    request = LoRARequest("placed", 123, "nowhere")
    seen = {"num_linears": place(one)}
    first = decode(request)
    place(two)
    seen["second_is_that_loaded_anew"] = same(decode(request), expected)
    seen["second_differs_from_first"] = not same(expected, first) and not same(expected, base)
    seen["pool"] = sorted({data.tag for data in CuMemAllocator.get_instance().pointer_to_data.values()})
    for _ in range(2):
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        again = same(decode(request), expected) and same(decode(), base)
        seen["survives"] = seen.get("survives", True) and again
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    place(one)
    llm.wake_up(tags=["kv_cache"])
    seen["placed_before_the_cache_wakes"] = same(decode(request), first)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("keep", [False, True], ids=["backed up", "resident"])
@pytest.mark.parametrize(
    "kernels", [{"linear": "stock", "lora": "stock"}, {}], ids=["vLLM's kernels", "kernels of ours"]
)
def test_adapters_act_under_cuda_graphs_and_survive_sleep(random_qwen2, random_adapter, run_script, kernels, keep):
    options = json.dumps(kernels | {"keep_base_resident": keep})
    seen = run_script(ADAPTERS, str(random_qwen2), str(random_adapter(1)), str(random_adapter(2)), options)
    assert seen.pop("num_linears") == 16
    assert seen.pop("pool") == (["kv_cache"] if keep else ["kv_cache", "weights"])
    assert all(seen.values()), seen
