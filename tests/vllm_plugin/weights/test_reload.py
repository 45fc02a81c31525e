"""Every format in vLLM's own kernels: syncs under CUDA graphs, with noise, and after a sleep at level 2."""

import json
import os
import subprocess
import sys

import pytest
from qerl_testing import random_decoder

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

FORMATS = ("fp8", "int8", "mxfp4", "nvfp4")
SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from verl_qerl.formats import get_format
from verl_qerl.verl_plugin.weight_sync.requantize import quantized_for_rollout
from verl_qerl.vllm_plugin.weights.reload import InPlaceReload

path, form = sys.argv[1], get_format(sys.argv[2])
with open(path + "/config.json") as file:
    tied = json.load(file).get("tie_word_embeddings", False)
cuda = torch.cuda.is_available()
PROMPT = [(7 * i + 3) % 500 for i in range(200)]

def sync(llm, tensors, num_before):
    def run(worker):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        reload = InPlaceReload(worker.model_runner.get_model(), worker.vllm_config, form, num_before)
        for item in quantized_for_rollout(tensors.items(), shapes, form, ("lm_head",), tied):
            reload.load([item])
        report = reload.finish()
        worker._qerl_noise.recapture()
        return [report.num_linears, report.num_checked]
    (found,) = llm.collective_rpc(run)
    return found

def main():
    name = "verl_qerl_" + form.name
    llm = LLM(path, dtype="bfloat16", max_model_len=512, max_num_seqs=4, skip_tokenizer_init=True,
              kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.1, enable_sleep_mode=cuda, enforce_eager=not cuda,
              enable_prefix_caching=False, load_format=name, quantization=name,
              hf_overrides={"quantization_config": form.config()},
              worker_extension_cls="verl_qerl.verl_plugin.weight_sync.worker_extension.WorkerExtension",
              additional_config={"verl_qerl": {"aqn": {"enabled": True}}},
              **({"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}} if cuda else {}))
    decode = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    prefill = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def ask():
        prompts = [{"prompt_token_ids": PROMPT}]
        steps = llm.generate(prompts, decode, use_tqdm=False)[0].outputs[0].logprobs
        read = llm.generate(prompts, prefill, use_tqdm=False)[0].prompt_logprobs[1:]
        return [[next(iter(step.values())).logprob for step in steps],
                [step[token].logprob for token, step in zip(PROMPT[1:], read)]]

    def linears(worker):
        found = {}
        for name, module in worker.model_runner.get_model().named_modules():
            if getattr(module, "scheme", None) is not None:
                scheme = module.scheme
                kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
                found[name.rpartition(".")[2]] = type(scheme).__name__ + " > " + type(kernel).__name__
        return found

    device = "cuda" if cuda else "cpu"
    weights = {name: tensor.to(device) for name, tensor in load_file(path + "/model.safetensors").items()}
    generator = torch.Generator(device).manual_seed(1)
    factors = {name: 1 + 0.3 * torch.randn(tensor.shape, generator=generator, device=device)
               for name, tensor in weights.items()}
    other = {name: (tensor.float() * factors[name]).bfloat16() for name, tensor in weights.items()}
    loaded = ask()
    seen = {"kernels": llm.collective_rpc(linears)[0], "repeats": ask() == loaded}
    seen["reports"] = [sync(llm, weights, 0)]
    seen["the weights it was loaded from change nothing"] = ask() == loaded
    seen["reports"].append(sync(llm, other, 1))
    changed = ask()
    seen["other weights act, in prefill and in decoding"] = changed[0] != loaded[0] and changed[1] != loaded[1]
    llm.collective_rpc("qerl_set_noise", args=(1e-2, 2))
    noisy = ask()
    if cuda:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
    seen["reports"].append(sync(llm, other, 2))
    if cuda:
        llm.wake_up(tags=["kv_cache"])
    seen["noise survives sleep and sync"] = noisy != changed and ask() == noisy
    llm.collective_rpc("qerl_set_noise", args=(0.0, 0))
    seen["noise goes"] = ask() == changed
    seen["reports"].append(sync(llm, weights, 3))
    seen["the old weights come back"] = ask() == loaded
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def tied_llama(tmp_path):
    """As `random_qwen2`; vLLM has a head of its own for it, with the weight of the embedding."""
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    random_decoder("llama", tie_word_embeddings=True, **heads, **sizes).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


@pytest.fixture
def found(random_qwen2, tied_llama, tmp_path):
    """Format -> what its engine showed. The engines run at the same time: they mostly start."""
    models = {"fp8": tied_llama, "int8": random_qwen2, "mxfp4": random_qwen2, "nvfp4": tied_llama}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    running = {}
    for form in FORMATS:
        log = (tmp_path / f"{form}.log").open("w")
        command = [sys.executable, str(script), str(models[form]), form]
        running[form] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    results = {}
    for form, process in running.items():
        process.wait(timeout=900)
        output = (tmp_path / f"{form}.log").read_text()
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        results[form] = json.loads(lines[0].removeprefix("RESULT ")) if lines else output[-6000:]
    return results


def test_every_format_is_replaced_in_place(found):
    failed = {}
    for form, seen in found.items():
        print(form, seen)
        if isinstance(seen, str):
            failed[form] = seen
            continue
        reports, kernels = seen.pop("reports"), seen.pop("kernels")
        assert set(kernels) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        wrong = [name for name, value in seen.items() if not value]
        if reports != [[16, 16], [16, 4], [16, 4], [16, 4]]:
            wrong.append(f"reports {reports}")
        if wrong:
            failed[form] = f"{wrong} with {kernels}"
    assert not failed, "\n".join(f"{form}: {text}" for form, text in failed.items())
