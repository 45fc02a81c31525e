"""Without an option of ours a process of verl is as if this package were not installed; with one, ours is in place."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

HOSTS = str(Path(__file__).with_name("hosts_cases.py"))
ON = {"VERL_QERL_ACTIVE": "1"}


@pytest.fixture(scope="module")
def hosts(fresh_json):
    """What verl has in a process of its own on a GPU's platform, after its driver looked at a run with `options`."""

    def look(*options: str, **env: str) -> dict:
        return fresh_json(HOSTS, *options, VERL_PLATFORM="nvidia", **env)

    return look


@pytest.fixture(scope="module")
def alone(hosts):
    """verl, with no plugin."""
    return hosts(VERL_USE_EXTERNAL_PLUGINS="none")


def assert_ours(found: dict) -> None:
    assert not [name for name in found["trainers"].values() if name.startswith("verl.")]
    assert found["replicas"]["vllm"] == "verl_qerl.verl_plugin.rollout.server._load_replica"
    assert found["rollouts"]["('vllm', 'async')"].startswith("verl_qerl.")
    models = found["engines"]["language_model"]
    assert (
        models["('cuda', 'nvidia')"] == models["('cpu', 'cpu')"] == "verl_qerl.verl_plugin.actor.engine.QerlFSDPEngine"
    )
    assert found["critic"][-1] == "shims.py"  # loaded with the attention of the run
    assert "acr" in found["policy losses"]


def test_a_stock_run_has_verls_own_classes_functions_and_environment(alone, hosts):
    found = hosts()
    assert set(alone.pop("our modules")) <= {"verl_qerl", "verl_qerl.config"}  # Hydra's search path
    heavy = ("trainer", "actor", "rollout", "weight_sync", "cpu", "config.spelling", "config.base_options")
    loaded = found.pop("our modules")
    assert "verl_qerl.verl_plugin.driver" in loaded
    assert not [name for name in loaded if name.removeprefix("verl_qerl.verl_plugin.").startswith(heavy)]
    # The one function that is wrapped: it calls verl's own at once.
    assert (found.pop("validate_config")[-1], alone.pop("validate_config")[-1]) == ("shims.py", "config.py")
    assert found == alone


def test_a_driver_that_finds_an_option_of_ours_registers_ours_and_tells_the_workers(hosts):
    found = hosts("+aqn.enabled=true", RAY_ADDRESS="elsewhere:6379")  # where the questions are
    assert_ours(found)
    assert found["of workers"] == ON
    assert "VERL_QERL_ACTIVE" not in found["environment"]  # a Ray that this process starts for another run has it not


def test_a_worker_that_is_told_registers_ours(hosts):
    assert_ours(hosts(**ON))


def test_ray_tells_the_workers_of_one_job_on_every_node_and_of_no_other(fresh_process):
    """Of a cluster that was there before; beside what an actor's own runtime environment says, and to its children."""
    script = Path(__file__).with_name("ray_jobs_cases.py")
    ours, stock = (json.loads(line) for line in fresh_process(str(script)).stdout.splitlines()[-2:])
    for told, expected in ((ours, "1"), (stock, "None")):
        assert len({actor.pop("node") for actor in told}) == 2
        assert told == [{"own": "1", "in a child": expected}] * 2
