"""Linears of a rollout on a GPU, by themselves and in vLLM."""

import json

import pytest
from bench_adapter_sums import measure
from qerl_testing import random_qwen2

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

# As many sequences as an RL step has, without an adapter: log-probs are numbers, and those of the same tokens read.
# Answers of 512 sequences at a time, and of fewer with every answer that ends: every number of rows.
SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from verl_qerl.formats import NVFP4

def main(path, options, count, length):
    llm = LLM(path, dtype="bfloat16", max_model_len=512, max_num_seqs=512, skip_tokenizer_init=True, seed=1,
              gpu_memory_utilization=0.02, kv_cache_memory_bytes=4 << 30, logprobs_mode="processed_logprobs",
              load_format="verl_qerl_nvfp4", quantization="verl_qerl_nvfp4",
              hf_overrides={"quantization_config": NVFP4().config()},
              worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
              additional_config={"verl_qerl": options})
    prompts = [{"prompt_token_ids": [(7 * i + 31 * (j // 8)) % 1000 for i in range(40 + j // 8 % 90)]}
               for j in range(count)]
    params = [SamplingParams(max_tokens=8 + (j * 37) % length, logprobs=0, ignore_eos=True, detokenize=False)
              for j in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    drawn = [[entry[token].logprob for token, entry in zip(one.outputs[0].token_ids, one.outputs[0].logprobs)]
             for one in outputs]
    whole = [{"prompt_token_ids": prompt["prompt_token_ids"] + list(one.outputs[0].token_ids)}
             for prompt, one in zip(prompts, outputs)]
    again = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    read = []
    for prompt, one, wanted in zip(prompts, llm.generate(whole, again, use_tqdm=False), whole):
        first = len(prompt["prompt_token_ids"])
        tokens = wanted["prompt_token_ids"][first:]
        read.append([entry[token].logprob for token, entry in zip(tokens, one.prompt_logprobs[first:])])
    wrong = [(j, t, value) for j, row in enumerate(drawn) for t, value in enumerate(row) if not value > -1e30]
    apart = [abs(a - b) for one, two in zip(drawn, read) for a, b in zip(one, two)]
    print("RESULT", json.dumps({"wrong": wrong[:20], "tokens": len(apart), "largest": max(apart),
                                "mean": sum(apart) / len(apart)}))

if __name__ == "__main__":
    main(sys.argv[1], *(json.loads(argument) for argument in sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The shapes of the GSM8K recipe's model, which no tuned table has."""
    folder = tmp_path_factory.mktemp("many") / "bf16"
    sizes = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12}
    random_qwen2(num_attention_heads=12, num_key_value_heads=12, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{}, {"linear": "stock", "sampler": "stock"}], ids=["ours", "stock"])
def test_many_sequences(run_script, model, options):
    found = run_script(SCRIPT, str(model), json.dumps(options), "1024", "200")
    assert found["wrong"] == []
    # Decoding and reading round differently; a row that went wrong is off by nats.
    assert found["mean"] < 0.02
    assert found["largest"] < 1.0


@pytest.mark.parametrize("linear", [("self_attn.q_proj", 1536, 1536), ("mlp.down_proj", 1536, 8960)], ids=str)
def test_nothing_of_a_small_adapter_is_lost(linear):
    name, *shape = linear
    rows = [64, 299, 300, 4096]  # our kernel's, and cuBLAS's
    shares = [row["share"] for row in measure({name: tuple(shape)}, rows, 16, 300, "cuda") if row["way"] == "rollout"]
    assert shares == pytest.approx([1] * 4, abs=0.15)
