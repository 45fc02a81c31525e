"""The head in FP8 on a GPU: Marlin's product against the decoded weight, and an engine that sleeps."""

import pytest
import torch

from verl_qerl.testing import assert_close

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from vllm import LLM, SamplingParams
from verl_qerl.formats.nvfp4_layout import quantization_config

def decode(lm_head, sleeps):
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.02,
              kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True, enable_sleep_mode=sleeps,
              load_format="verl_qerl_nvfp4", quantization="verl_qerl_nvfp4",
              hf_overrides={"quantization_config": quantization_config()},
              worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
              additional_config={"verl_qerl": {"lm_head": lm_head}})
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, prompt_logprobs=0, ignore_eos=True,
                            detokenize=False)
    tokens = [(7 * i + 3) % 1000 for i in range(200)]

    def ask():
        assert llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
        scored = [entry[token].logprob for token, entry in zip(tokens[1:], out.prompt_logprobs[1:], strict=True)]
        return scored + [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]

    before, kinds = ask(), llm.collective_rpc(lambda worker: str(worker.model_runner.get_model().lm_head.weight.dtype))
    if sleeps:
        llm.sleep(level=1)
        llm.wake_up()
    return {"before": before, "after": ask(), "kinds": kinds}

if __name__ == "__main__":
    print("RESULT", json.dumps(decode(sys.argv[2], sys.argv[2] == "fp8")))
"""


@pytest.mark.parametrize("rows", [1, 3, 16, 70, 300])
@pytest.mark.parametrize(("V", "K"), [(1024, 512), (38016, 3584), (1088, 896)], ids=str)
def test_marlin_multiplies_by_the_rounded_weight(rows, V, K):
    from verl_qerl.vllm_plugin.weights.head import FP8Head, quantize_rows

    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(V, K, generator=generator) * 0.02).bfloat16().cuda()
    weight[-64:] = 0  # what pads a vocabulary
    codes, scale = quantize_rows(weight)
    dense = codes.double() * scale
    head = torch.nn.Module()
    head.num_embeddings_per_partition, head.embedding_dim = V, K
    head.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    method = FP8Head()
    method.process_weights_after_loading(head)
    x, bias = torch.randn(rows, K, generator=generator).bfloat16().cuda(), torch.randn(V).bfloat16().cuda()
    assert_close(method.apply(head, x), x.double() @ dense.T, 2.5e-3)
    assert_close(method.apply(head, x, bias), x.double() @ dense.T + bias, 4e-3)
    assert not method.apply(head, x)[:, -64:].any()


def test_the_engine_sleeps_and_says_the_same_again(random_qwen2, run_script):
    fp8, bf16 = (run_script(SCRIPT, str(random_qwen2), kind) for kind in ("fp8", "bf16"))
    assert (fp8["kinds"], bf16["kinds"]) == (["torch.int32"], ["torch.bfloat16"])
    assert fp8["after"] == fp8["before"]
    change = torch.tensor(fp8["before"][:199]) - torch.tensor(bf16["before"][:199])
    spread = torch.tensor(bf16["before"][:199]).std()
    assert 0.005 * spread < change.abs().mean() < 0.04 * spread
