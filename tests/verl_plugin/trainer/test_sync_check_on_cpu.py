"""What the trainer asks the rollout workers after each sync; with workers: tests/e2e."""

import pytest

pytest.importorskip("verl")

import ray
from omegaconf import OmegaConf
from qerl_testing import load_beside

from verl_qerl.verl_plugin.config.apply import WORKER_EXTENSION
from verl_qerl.verl_plugin.trainer.sync_check import SyncCheck

featured = load_beside(__file__, "featured")


class Server:
    """Its answers, one call after the other; the last one stays."""

    def __init__(self, answers):
        self.collective_rpc, self.answers, self.num_calls = self, list(answers), 0

    def remote(self, method, kwargs):
        assert (method, kwargs) == ("qerl_last_sync", {})
        self.num_calls += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Asking(featured.trainer_of(SyncCheck)):
    def __init__(self, config, *servers):
        super().__init__(config)
        self.global_steps = 3
        self.servers = [Server(answers) for answers in servers]
        replicas = [type("Replica", (), {"servers": [server, None]}) for server in self.servers]
        self.llm_server_manager = type("Manager", (), {"get_replicas": lambda self: replicas})()


def config(base="int8", extension=WORKER_EXTENSION, mode="sync", disaggregated=False, **model):
    rollout = {"engine_kwargs": {"vllm": {"worker_extension_cls": extension}}}
    rollout |= {"disaggregation": {"enabled": disaggregated}}
    nodes = {"actor_rollout_ref": {"rollout": rollout, "model": {"lora_rank": 0, **model}}}
    nodes |= {"qerl": {"base": {"format": base}} if base else None, "trainer": {"v1": {"trainer_mode": mode}}}
    return OmegaConf.create(nodes)


ADAPTER = config("nvfp4", lora_rank=8)
SENT = {"sync_bytes": 10, "sync_bytes_bf16": 18}


def report(number, checksum=7, **more):
    return {"number": number, "checksum": checksum, **more}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda futures: futures)


def test_every_step_logs_what_was_sent_and_how_long_it_took():
    one, two = report(1, **SENT), report(2, 8, **SENT)
    trainer = Asking(config(), [[one, one], [two, two]], [[one], [two]])
    trainer.on_init_end()
    trainer.on_step_end()
    found = trainer._consume_sync_metrics()
    assert found.pop("qerl/sync_s") >= 0
    assert found == {"weight_sync/seconds": 0.5, "qerl/sync_bytes": 10, "qerl/sync_bytes_bf16": 18}


@pytest.mark.parametrize("given", [config(), ADAPTER], ids=["quantized", "adapter"])
@pytest.mark.parametrize(
    "answers",
    [
        [[[report(1), report(1, 8)]]],
        [[[report(1)]], [[report(1, 8)]]],
        [[[report(1, sync_bytes=9)]], [[report(1, sync_bytes=8)]]],
    ],
    ids=["workers", "replicas", "bytes"],
)
def test_workers_that_hold_different_weights_stop_the_run(given, answers):
    with pytest.raises(RuntimeError, match="the rollout workers hold different weights after a sync"):
        Asking(given, *answers).on_init_end()


@pytest.mark.parametrize("given", [config(), ADAPTER], ids=["quantized", "adapter"])
@pytest.mark.parametrize(
    ("second", "numbers"),
    [([[report(1)]], "[1]"), ([[report(2)], [report(1)]], "[1, 2]"), ([[]], "[]"), ([None], "[]")],
    ids=["old", "one is old", "no worker", "no answer"],
)
def test_a_sync_that_did_not_reach_a_worker_stops_the_run(given, second, numbers):
    trainer = Asking(given, *([[report(1)], answer] for answer in second))
    trainer.on_init_end()
    with pytest.raises(RuntimeError) as caught:
        trainer.on_step_end()
    assert f"they have taken {numbers} syncs, and 1 came before. Each must take every one." in str(caught.value)
    assert str(caught.value).startswith("the weights of step 3 did not reach all of ")


def test_a_run_goes_on_while_the_count_grows():
    # verl sends an adapter's base first, and once more inside a validation that scores with a reward model.
    trainer = Asking(ADAPTER, [[report(2)], [report(3, 8)], [report(5, 8)]])
    trainer.on_init_end()
    for _ in range(2):
        trainer.on_step_end()
        assert trainer._consume_sync_metrics() == {"weight_sync/seconds": 0.5}
    assert trainer.servers[0].num_calls == 3


@pytest.mark.parametrize(
    "other",
    [
        config(None, None),
        config(None, "mine.Extension"),
        config("nvfp4", disaggregated=True, lora_rank=8),
        config(None, mode="separate_async", lora_rank=8),
    ],
    ids=["stock", "another extension", "disaggregated", "separate_async"],
)
def test_other_workers_are_not_asked(other):
    trainer = Asking(other, [[report(0)]])
    trainer.on_init_end()
    trainer.on_step_end()
    assert trainer._consume_sync_metrics() == {"weight_sync/seconds": 0.5}
    assert trainer.servers[0].num_calls == 0
