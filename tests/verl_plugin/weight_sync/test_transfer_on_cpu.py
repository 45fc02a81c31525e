import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("verl")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("transfer_cases.py")


@pytest.fixture(scope="module")
def found(fresh_json):
    return fresh_json(str(SCRIPT))


def test_a_whole_stream_arrives(found):
    case = found["whole"]
    assert case["received"] == {"w0": 0, "w1": 1, "w2": 2, "w3": 3}
    assert case["error"] is None


@pytest.mark.parametrize("end", ["raises", "dies"])
def test_the_receiver_of_a_stream_that_breaks_off_is_told(found, end):
    case = found[end]
    # The third tensor was in a bucket that never left; two and the announcement of the buffer came.
    assert case["received"] == {"w0": 0, "w1": 1}
    assert case["error"].startswith("the actor has ended in the middle of a weight sync, after 3 messages.")
    assert case["waited_s"] < 20  # verl's own waits for ever


@pytest.mark.parametrize("end", ["raises", "dies"])
def test_the_sender_to_a_receiver_that_ends_is_told(found, end):
    case = found[f"to one that {end}"]
    # Of the buffer and the first bucket; the second one broke off.
    assert case["error"].startswith("the rollout's worker has ended in the middle of a weight sync, after 2 answers.")
    assert case["seconds"] < 40  # a process takes its time to import verl


def test_a_sender_looks_after_a_receiver_that_says_nothing(found):
    case = found["to one that never comes"]
    assert case["error"] == "the engine has ended"
    assert case["looks"] == 3
    assert 2 < case["seconds"] < 10


def test_a_receiver_that_takes_its_time_gets_everything(found):
    assert found["to one that is whole"]["error"] is None
    assert found["to one that is slow"]["error"] is None
    assert found["to one that is slow"]["looks"] >= 3
