"""An engine that decodes more sequences than vLLM's own CUDA graphs have, against one without graphs."""

import json

import pytest
from qerl_testing import compare_greedy

from verl_qerl.vllm_plugin.decode.graph_sizes import VLLMS, larger_sizes

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

SEQUENCES = 600
SCRIPT = """
import json, sys
from sleeping_engine import start
from vllm import SamplingParams

def count(worker):
    dispatcher = worker.model_runner.cudagraph_dispatcher
    dispatch, worker.seen = dispatcher.dispatch, []

    def counted(num_tokens, *args, **kwargs):
        mode, batch = dispatch(num_tokens, *args, **kwargs)
        worker.seen.append([num_tokens, mode.name, batch.num_tokens])
        return mode, batch

    dispatcher.dispatch = counted

def main():
    sequences, compilation = json.loads(sys.argv[2])
    llm = start(sys.argv[1], {}, max_num_seqs=sequences, max_model_len=64, compilation_config=compilation)
    llm.collective_rpc(count)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + length) % 1000 for i in range(4)]} for length in range(sequences)]
    outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    decoded = [[[token, entry[token].logprob] for token, entry in zip(one.token_ids, one.logprobs)] for one in outputs]
    seen = llm.collective_rpc(lambda worker: worker.seen)[0]
    print("RESULT", json.dumps({"decoded": decoded, "seen": seen}))

if __name__ == "__main__":
    main()
"""


def test_they_decode_in_graphs_what_they_decode_without(random_qwen2, run_script):
    found, without = (
        run_script(SCRIPT, str(random_qwen2), json.dumps([SEQUENCES, options]))
        for options in (
            {"cudagraph_capture_sizes": [8, VLLMS[-1], *larger_sizes(SEQUENCES)]},
            {"cudagraph_mode": "NONE"},
        )
    )
    assert [SEQUENCES, "FULL", SEQUENCES] in found["seen"]
    assert {mode for _, mode, _ in without["seen"]} <= {"NONE"}
    compared = compare_greedy(found["decoded"], without["decoded"])
    assert max(compared.differences) < 0.02
    assert compared.agreed > 0.97
