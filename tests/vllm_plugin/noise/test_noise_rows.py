"""Draws of their own for sequences and tokens under CUDA graphs and in sleep mode, which only a GPU has."""

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

# More requests than decode at a time, of prompts of different lengths; sigma is far above what rounding does.
SCRIPT = """
import json, os, statistics, sys
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # as in verl
import torch
from sleeping_engine import decode, noise, start
from vllm import SamplingParams
from qerl_testing import compare_greedy
from verl_qerl.vllm_plugin.noise.noise_rows import FORCED_DRAW, SCHEDULER

SIGMA, STEP = 0.3, 3

def ask(llm, prompts, rows):
    params = [
        SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False,
                       extra_args=None if row is None else {FORCED_DRAW: row})
        for row in rows
    ]
    assert llm.reset_prefix_cache()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [
        [(token, entry[token].logprob) for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in answers
    ]

def off(answers, others):
    return statistics.mean(compare_greedy(answers, others).differences)

def main():
    model, draw = sys.argv[1:]
    options = {} if draw == "batch" else {"scheduler_cls": SCHEDULER}
    llm = start(model, {"aqn": {"enabled": True, "draw": draw}}, max_num_seqs=24, **options)
    kinds = llm.collective_rpc(lambda worker: [
        type(module).__name__ for module in worker.model_runner.get_model().modules()])[0]
    seen = {"kinds": [kinds.count(kind) for kind in ("RowRMSNorm", "PDLRMSNorm")], "clean": decode(llm)}
    one = [(5 * i + 1) % 1000 for i in range(40)]
    mixed = [[(7 * i + length) % 1000 for i in range(length)] for length in range(5, 53)]
    quiet = ask(llm, [one] * 8, [None] * 8)
    seen["num_norms"] = noise(llm, SIGMA, STEP)
    seen["noisy"] = decode(llm)
    if draw == "batch":
        seen["alone"] = ask(llm, [one], [None])[0]
    else:
        group = ask(llm, [one] * 8, [None] * 8)
        seen["first"] = [abs(a[0][1] - b[0][1]) for a, b in zip(group, quiet, strict=True)]
        seen["second"] = [answer[1][1] for answer in group]
        seen["quiet_second"] = [answer[1][1] for answer in quiet]
        alone = {row: ask(llm, [one], [row])[0] for row in (1, 2)}
        seen["alone"], seen["repeats"] = alone[1], ask(llm, [one], [1])[0] == alone[1]
        seen["rows_differ"] = off([alone[1]], [alone[2]])
        # In a batch, each with a row of its own, and each by itself.
        rows = [i % 5 for i in range(len(mixed))]
        batched = ask(llm, mixed, rows)
        singles = [ask(llm, [prompt], [row])[0] for prompt, row in zip(mixed, rows, strict=True)]
        others = [ask(llm, [prompt], [row + 1])[0] for prompt, row in zip(mixed, rows, strict=True)]
        seen["same_rows"], seen["other_rows"] = off(batched, singles), off(batched, others)
    llm.sleep(level=1)
    noise(llm, 0.0, 0)
    llm.wake_up()
    seen["restored"] = decode(llm)
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def test_draws_of_their_own_under_cuda_graphs(random_qwen2, run_script, hopper):
    sequence, token, one_draw = (run_script(SCRIPT, str(random_qwen2), kind) for kind in ("sequence", "token", "batch"))
    check(sequence, one_draw, hopper, least=8)
    check(token, one_draw, hopper, least=6)  # two tokens may have one of the 64 draws


def check(seen, one_draw, hopper, least):
    """Of answers with a draw each, and of one draw for all; the second tokens of `least` of eight answers differ."""
    print({name: value for name, value in seen.items() if isinstance(value, float)})
    assert seen["kinds"] == [8, 1 if hopper else 0]
    assert seen["num_norms"] == 8
    assert one_draw["kinds"][0] == 0
    # 199 log-probs of the prompt and that of the first token are clean, the others are not.
    assert seen["noisy"][:200] == seen["clean"][:200]
    assert all(a != b for a, b in zip(seen["noisy"][200:], seen["clean"][200:], strict=True))
    assert seen["restored"] == seen["clean"]
    assert one_draw["restored"] == one_draw["clean"]
    # Of one prompt the answers begin alike and go on apart.
    assert max(seen["first"]) < 0.05
    assert len(set(seen["second"])) >= least
    spread, quiet = (max(seen[name]) - min(seen[name]) for name in ("second", "quiet_second"))
    assert spread > 0.1 > 5 * quiet
    # The first row of the table is the draw of the whole batch; rows reach graphs of any batch.
    assert seen["repeats"]
    if hopper:
        assert seen["alone"] == one_draw["alone"]
        assert seen["clean"] == one_draw["clean"]
    assert seen["rows_differ"] > 0.01
    assert seen["same_rows"] < 0.03
    assert seen["other_rows"] > 0.1
