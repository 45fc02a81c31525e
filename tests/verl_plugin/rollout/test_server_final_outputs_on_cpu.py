import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("verl")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("final_outputs_cases.py")


@pytest.fixture(scope="module")
def found(fresh_process, models):
    result = fresh_process(str(SCRIPT), str(models / "bf16"))
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"stock"')))


def test_an_answer_is_what_it_was(found):
    names = ("tokens", "log_probs", "why")
    assert len(found["stock"]["tokens"]) == len(found["stock"]["log_probs"]) == 12
    for which in ("ours", "after"):
        assert [found[which][name] for name in names] == [found["stock"][name] for name in names]


def test_one_output_is_made_of_it(found):
    assert [found[which]["made"] for which in ("stock", "ours", "after")] == [12, 1, 1]


def test_requests_that_are_not_of_the_server_are_served_as_before(found):
    assert found["of others"] == found["stock"]


def test_requests_are_aborted_while_they_run(found):
    aborted = found["abort"]
    assert aborted["admitting"] == [0, 0]
    assert aborted["seconds"] < 5  # verl waits for 60 s for a request that is not admitted
    assert (aborted["said"], aborted["reasons"]) == (3, ["aborted"])
    assert all(0 < length < 1500 for length in aborted["lengths"])


def test_answers_are_scored_while_other_requests_wait(found):
    assert found["scoring"] == {
        **{"aborted": "aborted", "waits": True, "still waits": True, "admitting": 0},
        **{"scored": 3, "then": "completed"},
    }


def test_a_caller_that_goes_away_leaves_nothing_behind(found):
    gone = {"cancelled": "CancelledError", "left": 0, "admitting": 0, "asked": 0}
    assert {name: found["gone"][name] for name in gone} == gone
    assert found["gone"]["refused"] not in ("CancelledError", "TokenOutput")
