"""An engine whose graphs are of whole steps, against one with vLLM's pieces."""

import json

import pytest
import torch

from verl_qerl import testing

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

# 250 at most decode at a time, more than a captured size and fewer than the next one, and end one by one: the others
# begin among them, those with long prompts beyond all graphs.
SCRIPT = """
import collections, json, sys
from sleeping_engine import start
from vllm import SamplingParams

def watch(worker):
    dispatcher = worker.model_runner.cudagraph_dispatcher
    dispatch, worker.modes = dispatcher.dispatch, collections.Counter()
    def watched(*args, uniform_decode, **options):
        mode, key = dispatch(*args, uniform_decode=uniform_decode, **options)
        worker.modes[f"{mode.name} {'decodes' if uniform_decode else 'begins'}"] += 1
        return mode, key
    dispatcher.dispatch = watched

def main():
    llm = start(sys.argv[1], json.loads(sys.argv[2]), max_num_seqs=250)
    llm.collective_rpc(watch)
    lengths = [1 + 37 * i % 300 for i in range(500)]
    greedy = {"temperature": 0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(max_tokens=20 + 7 * i % 45, **greedy) for i in range(len(lengths))]
    prompts = [{"prompt_token_ids": [(7 * i + length) % 1000 for i in range(length)]} for length in lengths]

    def decode():
        assert llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        both = [zip(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]
        return [[[token, entry[token].logprob] for token, entry in one] for one in both]

    before = decode()
    modes = llm.collective_rpc(lambda worker: dict(worker.modes))[0]
    llm.sleep(level=1)
    llm.wake_up()
    print("RESULT", json.dumps({"modes": modes, "decoded": before, "repeats": decode() == before}))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def model(tmp_path):
    """With random weights, and heads of 128 columns as those of 7B and more: FlashAttention's tiles depend on them."""
    sizes = {"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4}
    testing.random_qwen2(num_attention_heads=8, num_key_value_heads=2, **sizes).save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


def test_steps_in_which_requests_begin_are_whole_graphs(model, run_script):
    ours, stock = (run_script(SCRIPT, str(model), json.dumps(options)) for options in ({}, {"graphs": "stock"}))
    differences, total = [], 0
    for one, other in zip(ours["decoded"], stock["decoded"], strict=True):
        total += len(one)
        for (token, log_prob), (its_token, its_log_prob) in zip(one, other, strict=True):
            differences.append(abs(log_prob - its_log_prob))
            if token != its_token:
                break  # two of random weights nearly as probable: what follows is another text
    print(ours["modes"], stock["modes"], f"{len(differences)} of {total} tokens, {max(differences)} at most")
    assert set(stock["modes"]) == {"FULL decodes", "PIECEWISE decodes", "PIECEWISE begins", "NONE begins"}
    assert set(ours["modes"]) == {"FULL decodes", "FULL begins", "NONE begins"}
    assert ours["modes"]["FULL begins"] == stock["modes"]["PIECEWISE begins"] > 20
    assert ours["modes"]["FULL decodes"] == stock["modes"]["FULL decodes"] + stock["modes"]["PIECEWISE decodes"]
    assert ours["repeats"]
    # Both round weights and results to bf16; FlashAttention may split sequences in other places. Keys of a neighbour
    # would make it 0.2 on average.
    assert max(differences) < 0.03
    assert len(differences) > 0.75 * total  # 0.87 on an H200
