"""Started by test_export_vllm_on_cpu.py and test_export_stock_vllm.py: log-probs of fixed tokens from several engines.

python ask_vllm.py <json of [{"name", "model", "lora", "reference_kernel", "options"}]>
"""

import gc
import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

TOKENS = [(7 * i) % 300 for i in range(64)]
SIZES = {"max_model_len": 128, "max_num_seqs": 2}


def ask(model, lora, reference_kernel, options):
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.kernels import linear

    marlin = linear.MarlinNvFp4LinearKernel
    if reference_kernel:  # vLLM has no NVFP4 kernel for a CPU; everything before the kernel is its own
        from verl_qerl.vllm_plugin.weights.reference_kernels import ReferenceKernel

        linear.MarlinNvFp4LinearKernel = ReferenceKernel
    if lora:
        options = options | {"enable_lora": True, "max_lora_rank": 8}
    engine = vllm.LLM(model, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, **SIZES, **options)
    linear.MarlinNvFp4LinearKernel = marlin
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    request = LoRARequest("trained", 1, lora) if lora else None
    (output,) = engine.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False, lora_request=request)
    pairs = zip(TOKENS[1:], output.prompt_logprobs[1:], strict=True)
    return [engine.llm_engine.model_config.quantization, [found[token].logprob for token, found in pairs]]


if __name__ == "__main__":
    found = {}
    for case in json.loads(sys.argv[1]):
        name = case.pop("name")
        found[name] = ask(**case)
        gc.collect()
    print("RESULT", json.dumps(found))
