import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray

from verl_qerl.errors import UpstreamDriftError
from verl_qerl.verl_plugin.weight_sync.run_name import of_this_run, run_name

SCRIPT = Path(__file__).with_name("run_name_cases.py")


@pytest.fixture
def cluster(monkeypatch):
    context = SimpleNamespace(get_job_id=lambda: "01000000", get_session_name=lambda: "session_1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def test_a_name_is_of_job_and_session(cluster):
    assert run_name() == "01000000-3a1d7b6848ba"  # printf session_1 | sha256sum


def test_an_address_gets_the_name_once(cluster):
    address = of_this_run("ipc:///tmp/zmq-01000000-replica-0-rank-1.sock")
    assert address == f"ipc:///tmp/zmq-{run_name()}-replica-0-rank-1.sock"
    assert of_this_run(address) == address


@pytest.mark.parametrize("job", ["1", "01000000-01000000"])
def test_an_address_that_verl_makes_otherwise_is_refused(cluster, job):
    with pytest.raises(UpstreamDriftError, match=rf"verl's socket is ipc:///tmp/zmq-{job}\.sock\. Ray's job id, 01000"):
        of_this_run(f"ipc:///tmp/zmq-{job}.sock")


def test_two_clusters_of_a_machine_count_alike_and_are_named_apart(fresh_process, tmp_path):
    said = fresh_process(str(SCRIPT), str(tmp_path), ranks=2).stdout
    first, second = (json.loads(line) for line in said.splitlines() if line.startswith('{"driver"'))
    assert first["driver"]["job"] == second["driver"]["job"]
    for cluster in (first, second):
        assert cluster["actor"] == cluster["driver"]
        assert cluster["driver"]["name"] in cluster["driver"]["handle"]
    assert first["driver"]["name"] != second["driver"]["name"]
