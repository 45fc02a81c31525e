import importlib
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import ray
from omegaconf import OmegaConf
from qerl_testing import load_beside

from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.verl_plugin.config.apply import WORKER_EXTENSION
from verl_qerl.verl_plugin.trainer import noise
from verl_qerl.verl_plugin.trainer.noise import Noise, set_noise
from verl_qerl.vllm_plugin.options import SCHEDULER

featured = load_beside(__file__, "featured")
Trainer = featured.trainer_of(Noise)


def configuration(aqn=None, name="vllm", mode="sync", **kwargs):
    rollout = {"name": name, "engine_kwargs": {"vllm": kwargs}}
    nodes = {"actor_rollout_ref": {"rollout": rollout}, "trainer": {"v1": {"trainer_mode": mode}, "total_epochs": 2}}
    config = OmegaConf.create(nodes if aqn is None else nodes | {"aqn": aqn})
    OmegaConf.set_struct(config, True)  # as Hydra does
    return config


def with_answers(monkeypatch, *answers):
    """A trainer whose servers answer one each; returns it and the calls."""
    calls = []
    monkeypatch.setattr(ray, "get", lambda results: results)
    made = Trainer(configuration({"enabled": True, "num_stages": 2, "sigma_start": 5e-4}))
    servers = [
        SimpleNamespace(
            collective_rpc=SimpleNamespace(remote=lambda method, kwargs, found=found: calls.append(kwargs) or found),
            qerl_clear_kv_cache=SimpleNamespace(remote=lambda: calls.append("clear")),
        )
        for found in answers
    ]
    # The second server of a replica shares the workers of the first.
    replicas = [SimpleNamespace(servers=[server, None]) for server in servers]
    made.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
    return made, calls


def test_metrics_join_those_of_the_weight_sync(monkeypatch):
    made, _ = with_answers(monkeypatch, [(3, 7)])
    made.on_init_end()
    made.global_steps = 3  # of the second stage of two
    made.on_step_end()
    assert made._consume_sync_metrics() == {"weight_sync/seconds": 0.5, "aqn/sigma": 5e-4}
    assert "set_noise" in made.timing_raw


def test_every_replica_is_asked_once(monkeypatch):
    made, calls = with_answers(monkeypatch, [(3, 7)], [[3, 7]])
    made.on_init_end()
    assert calls == [{"sigma": 0.0, "step": 1}] * 2


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([[(3, 7)], [(2, 7)]], "[2, 3]"),
        ([[(3, 7), (2, 7)]], "[2, 3]"),
        ([[(0, 0)], [(0, 0)]], "[0]"),
        ([None], "[]"),  # verl's own server, which drops the answers
        ([[], []], "[]"),
        ([], "[]"),
    ],
    ids=["replicas", "workers", "zero", "none", "empty", "no-replica"],
)
def test_answers_must_be_equal_and_above_zero(monkeypatch, answers, told):
    made, _ = with_answers(monkeypatch, *answers)
    with pytest.raises(RuntimeError) as caught:
        made.on_init_end()
    assert str(caught.value).startswith(f"the rollout workers set {told} norms. All must set the same number")
    assert made.log == []  # no weights are sent after it


@pytest.mark.parametrize("answers", [([(3, 7)], [(3, 8)]), ([(3, 7), (3, 8)],)], ids=["replicas", "workers"])
def test_weights_must_be_equal(monkeypatch, answers):
    made, _ = with_answers(monkeypatch, *answers)
    with pytest.raises(RuntimeError) as caught:
        made.on_init_end()
    assert str(caught.value).startswith(
        "the rollout workers set 3 norms to 2 different sets of weights at {'sigma': 0.0, 'step': 1}. All must sample"
    )
    assert made.log == []


@pytest.mark.parametrize("step", [0, 5])
def test_steps_outside_of_training_have_no_noise(monkeypatch, step):
    made, calls = with_answers(monkeypatch, [(3, 7)])
    set_noise(made.run, made.run.sigma(step), step)
    assert calls == [{"sigma": 0.0, "step": step}]


def test_noise_is_spread_over_the_steps_that_come(monkeypatch):
    """verl's loop ends with the last epoch, whatever number of steps the run names."""
    made, calls = with_answers(monkeypatch, [(3, 7)])  # two stages
    made.total_training_steps, made.steps_per_epoch = 100, 3
    made.on_init_end()
    for made.global_steps in range(1, 7):
        made.on_step_end()
    assert [call["sigma"] for call in calls] == [0.0, 0.0, 0.0, 5e-4, 5e-4, 5e-4, 0.0]


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"unknown option aqn\.sigmas=1\. Known options are enabled, sigma_start"):
        Trainer(configuration({"sigmas": 1}))


def test_a_run_is_prepared_before_features_read_it():
    """Where verl's check on the driver is not as expected."""
    config = configuration({"enabled": True, "seed": 3}, max_num_seqs=8, additional_config={"mine": 1})
    kwargs = Trainer(config).config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert (kwargs.worker_extension_cls, kwargs.max_num_seqs) == (WORKER_EXTENSION, 8)
    assert (kwargs.additional_config.mine, kwargs.additional_config.verl_qerl.aqn.seed) == (1, 3)
    assert OmegaConf.is_struct(config)  # a misspelt key is still noticed
    for refused in ({"mode": "separate_async"}, {"name": "sglang"}):
        with pytest.raises(ValueError, match=r"does not go together with \+aqn\.enabled=true: other"):
            Trainer(configuration({"enabled": True}, **refused))
        assert not Trainer(configuration({"enabled": False}, **refused)).features


def test_the_scheduler_of_draws_is_there():
    module, _, name = SCHEDULER.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def begun(monkeypatch, caplog, total_steps, steps):
    """A run of so many steps with three stages over `total_steps`, whose warnings at the start `caplog` has."""
    made, _ = with_answers(monkeypatch, [(3, 7)])
    made.run.aqn = AQNConfig(enabled=True, num_stages=3, total_steps=total_steps)
    made.total_training_steps = steps
    with caplog.at_level(logging.WARNING, logger=noise.__name__):
        made.on_init_end()
    return made


SKIPPED = (
    "aqn.num_stages=3 exceeds the 2 steps that the stages are spread over: some are skipped, the last of them too, and"
    " sigma ends at 0.01 instead of sigma_end=0.0005."
)


@pytest.mark.parametrize(
    ("total_steps", "steps", "told"), [(None, 2, True), (2, 9, True), (None, 3, False), (None, 0, False)]
)
def test_skipped_stages_are_told(monkeypatch, caplog, total_steps, steps, told):
    begun(monkeypatch, caplog, total_steps, steps)
    assert (SKIPPED in caplog.messages) == told


@pytest.mark.parametrize(("total_steps", "steps", "told"), [(600, 200, True), (600, 201, False), (None, 3, False)])
def test_a_run_that_ends_in_the_stage_without_noise_is_told(monkeypatch, caplog, total_steps, steps, told):
    made = begun(monkeypatch, caplog, total_steps, steps)
    assert (made.run.sigma(steps) == 0) == told
    assert (
        any(one.startswith("no step of this run has noise: it ends after 200 steps,") for one in caplog.messages)
        == told
    )
