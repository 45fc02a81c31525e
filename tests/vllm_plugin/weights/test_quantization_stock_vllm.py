"""Stock vLLM, without our plugin, loads what `quantize` writes and computes with the same bits as our loader."""

import json

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.02,
              kv_cache_memory_bytes=1 << 30, enforce_eager=True,
              skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    ids = [(7 * i + 3) % 1000 for i in range(300)]
    out = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    log_probs = [next(iter(entry.values())).logprob for entry in out.prompt_logprobs[1:]]
    print("RESULT", json.dumps([llm.llm_engine.model_config.quantization, log_probs, list(out.outputs[0].token_ids)]))
"""


def test_stock_vllm_computes_the_same_as_our_loader(tmp_path, random_qwen2, run_script):
    from verl_qerl.cli import main
    from verl_qerl.formats import NVFP4

    assert main(["quantize", "--model", str(random_qwen2), "--out", str(tmp_path / "nvfp4")]) == 0
    ours = {"load_format": "verl_qerl_nvfp4", "quantization": "verl_qerl_nvfp4"}
    ours["hf_overrides"] = {"quantization_config": NVFP4().config()}
    ours["additional_config"] = {"verl_qerl": {"linear": "stock"}}  # Marlin on both sides
    method, log_probs, tokens = run_script(SCRIPT, str(tmp_path / "nvfp4"), "{}", plugins="none")
    our_method, our_log_probs, our_tokens = run_script(SCRIPT, str(random_qwen2), json.dumps(ours))
    assert (method, our_method) == ("compressed-tensors", "verl_qerl_nvfp4")
    assert log_probs == our_log_probs
    assert tokens == our_tokens
