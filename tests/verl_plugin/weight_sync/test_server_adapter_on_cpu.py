import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("verl")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("server_adapter_cases.py")


@pytest.fixture(scope="module")
def found(fresh_json):
    return fresh_json(str(SCRIPT))


@pytest.mark.parametrize("what", ["ends", "base", "split"])
def test_both_ends_are_at_one_place(found, what):
    for cluster in found:
        here, there = cluster[what]
        assert here == there


@pytest.mark.parametrize("what", ["ends", "base"])
def test_two_clusters_are_at_two_places(found, what):
    first, second = (cluster[what][0] for cluster in found)
    assert first != second
    assert len(first.removeprefix("ipc://")) <= 107


def test_the_rest_of_the_address_is_verls(found):
    # Stock verl names the servers where prefill and decode are apart, and we leave it alone.
    assert found[0]["split"][0] == "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-1.sock"
    first = found[0]["ends"][0]
    assert first.startswith("ipc:///tmp/rl-colocate-zmq-01000000-")
    assert first.endswith("-replica-0-rank-1.sock")


def test_weights_are_not_sent_to_an_engine_that_has_ended(found):
    (refused, sent), *others = found[0]["syncs"]
    assert refused.startswith("no weights are sent: vLLM's engine has ended.")
    assert sent == []
    assert others == [[None, [["weights", 3]]]] * 2


def test_a_sender_that_waits_asks_for_its_engine_and_for_what_the_workers_raise(found):
    healthy, ended, failed, whole, alone = found[0]["waiting"]
    assert healthy is whole is alone is None
    assert ended.startswith("RuntimeError: a weight sync breaks off: vLLM's engine has ended.")
    assert failed == "ValueError: no memory"
