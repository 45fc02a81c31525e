"""Which parameters a request gets; tests/verl_plugin/rollout/test_server_final_outputs_on_cpu.py has an engine."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_qerl.vllm_plugin.decode.final_outputs import FinalOutputs

pytest.importorskip("vllm")


def asked(params):
    with FinalOutputs(SimpleNamespace(add_request=None)).asking("1", params) as found:
        return found


def test_stop_strings_are_looked_for_in_the_text():
    assert "detokenize" not in asked({"stop": ["\n\n"]})
    assert asked({"stop": []})["detokenize"] is False


def test_what_a_request_sets_itself_stays():
    given = {"output_kind": 0, "detokenize": True, "flat_logprobs": False}
    assert asked(given) == given


def test_log_probs_of_prompts_keep_their_form():
    assert "flat_logprobs" not in asked({"prompt_logprobs": 0})


@pytest.mark.parametrize(("request_id", "there"), [("1", "whole"), ("2", None)])
def test_no_empty_output_hides_an_answer_or_goes_to_others(request_id, there):
    async def add_request(request_id):
        return SimpleNamespace(output=there, put=None)

    async def scenario():
        engine = SimpleNamespace(add_request=add_request)
        with FinalOutputs(engine).asking("1", {}):
            return await engine.add_request(request_id)

    assert asyncio.run(scenario()).output == there
