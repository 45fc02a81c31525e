"""Noise and adapters under CUDA graphs and in sleep mode, which only a GPU has."""

import json

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys
import torch
from sleeping_engine import decode, noise, norms, same, start

def main():
    def kinds(worker):
        names = [type(module).__name__ for module in worker.model_runner.get_model().modules()]
        return names.count("PDLRMSNorm"), names.count("PDLSiluAndMul")

    llm = start(sys.argv[1], {"aqn": {"enabled": True}})
    clean, clean_norms = decode(llm), norms(llm)
    seen = {"repeats": decode(llm) == clean, "num_norms": noise(llm, 5e-4, 1)}
    hopper = torch.cuda.get_device_capability() == (9, 0)
    seen["own_norms"] = llm.collective_rpc(kinds)[0] == ((9, 4) if hopper else (0, 0))
    seen["small_sigma_acts"] = decode(llm) != clean
    noise(llm, 1e-2, 2)
    noisy, noisy_norms = decode(llm), norms(llm)
    seen["sigma_acts"] = noisy != clean
    llm.sleep(level=1)
    noise(llm, 0.0, 0)
    llm.wake_up()
    seen["restored_while_asleep"] = decode(llm) == clean and same(norms(llm), clean_norms)
    noise(llm, 1e-2, 2)
    seen["same_draw_again"] = decode(llm) == noisy and same(norms(llm), noisy_norms)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def test_noise_acts_under_cuda_graphs_and_is_undone_while_asleep(random_qwen2, run_script):
    seen = run_script(SCRIPT, str(random_qwen2))
    assert seen.pop("num_norms") == 8
    assert all(seen.values()), seen


ADAPTERS = """
import json, sys
from safetensors.torch import load_file
from sleeping_engine import decode, start
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.lora.request import LoRARequest
from verl_qerl.vllm_plugin.adapter.buffers import flatten, place_adapter

def main():
    model, one, two, options = sys.argv[1:]
    llm = start(model, json.loads(options), enable_lora=True, max_loras=1, max_lora_rank=16)

    def near(a, b):
        # vLLM's kernels for adapters add in the order in which they come; what is sampled then soon differs.
        stock = json.loads(options).get("lora") == "stock"
        return all(abs(x - y) < 0.02 for x, y in zip(a[:199], b[:199])) if stock else a == b

    def place(folder):
        def put(worker):
            manager = worker.model_runner.lora_manager._adapter_manager
            saved = load_file(folder + "/adapter_model.safetensors")
            tensors = {name: tensor.to(worker.device) for name, tensor in saved.items()}
            config = json.load(open(folder + "/adapter_config.json"))
            return place_adapter(manager, 123, *flatten(tensors, manager.lora_config.lora_dtype), config)
        return llm.collective_rpc(put)[0]

    fresh = LoRARequest("fresh", 7, two)
    expected, base = decode(llm, fresh), decode(llm)
    request = LoRARequest("placed", 123, "nowhere")
    seen = {"num_linears": place(one)}
    first = decode(llm, request)
    place(two)
    seen["second_is_that_loaded_anew"] = near(decode(llm, request), expected)
    seen["second_differs_from_first"] = not near(expected, first) and not near(expected, base)
    seen["pool"] = sorted({data.tag for data in CuMemAllocator.get_instance().pointer_to_data.values()})
    for _ in range(2):
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        again = near(decode(llm, request), expected) and near(decode(llm), base)
        seen["survives"] = seen.get("survives", True) and again
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    place(one)
    llm.wake_up(tags=["kv_cache"])
    seen["placed_before_the_cache_wakes"] = near(decode(llm, request), first)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "kernels", [{"linear": "stock", "lora": "stock"}, {}], ids=["vLLM's kernels", "kernels of ours"]
)
def test_adapters_act_under_cuda_graphs_and_survive_sleep(random_qwen2, random_adapter, run_script, kernels):
    seen = run_script(ADAPTERS, str(random_qwen2), str(random_adapter(1)), str(random_adapter(2)), json.dumps(kernels))
    assert seen.pop("num_linears") == 16
    assert seen.pop("pool") == ["kv_cache", "weights"]
    assert all(seen.values()), seen
