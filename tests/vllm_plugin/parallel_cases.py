"""Started by test_worker_parallel*.py: an engine on any number of ranks. Prints what it finds as JSON.

python parallel_cases.py <model> <adapter> <another> <prompt> <options of vllm.LLM> <options of ours>
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from verl_qerl.formats import NVFP4


def place(worker, folder, number):
    from safetensors.torch import load_file

    from verl_qerl.vllm_plugin.adapter.buffers import flatten, place_adapter

    manager = worker.model_runner.lora_manager._adapter_manager
    saved = load_file(folder + "/adapter_model.safetensors")
    tensors = {name: tensor.to(worker.device) for name, tensor in saved.items()}
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    count = place_adapter(manager, number, *flatten(tensors, manager.lora_config.lora_dtype), config)
    return count, len(manager.qerl_plan.by_layer)


def kinds(worker):
    return sorted(
        {
            type(module).__name__
            for module in worker.model_runner.get_model().modules()
            if hasattr(module, "lora_a_stacked")
        }
    )


def digests(worker):
    from verl_qerl.vllm_plugin.weights.loader import base_digests

    return base_digests(worker.model_runner.get_model())


def main():
    model, one, two, prompt, options, ours = sys.argv[1:]
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.02,  # that much must be free, and others may be on these GPUs
        kv_cache_memory_bytes=1 << 26,
        skip_tokenizer_init=True,
        load_format="verl_qerl_nvfp4",
        quantization="verl_qerl_nvfp4",
        hf_overrides={"quantization_config": NVFP4().config()},
        enable_lora=True,
        max_loras=1,
        max_lora_rank=16,
        worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
        additional_config={"verl_qerl": json.loads(ours)},
        **json.loads(options),
    )
    tokens = json.loads(prompt)

    def log_probs(request=None):
        assert llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        out = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False, lora_request=request)[0]
        return [found[token].logprob for token, found in zip(tokens[1:], out.prompt_logprobs[1:], strict=True)]

    rpc = llm.collective_rpc
    seen = {"kinds": rpc(kinds), "digests": rpc(digests), "base": log_probs()}
    seen["loaded"] = log_probs(LoRARequest("loaded", 5, two))
    seen["counts"] = rpc(place, args=(one, 123))
    placed = LoRARequest("placed", 123, "nowhere")
    seen["one"] = log_probs(placed)
    rpc(place, args=(two, 123))
    seen["two"] = log_probs(placed)
    seen["norms"] = rpc("qerl_set_noise", args=(5e-2, 3))
    seen["noisy"] = log_probs(placed)
    rpc("qerl_set_noise", args=(0.0, 0))
    seen["quiet"] = log_probs(placed)
    print("RESULT", json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
