import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_qerl.verl_plugin.trainer import engine_health
from verl_qerl.verl_plugin.trainer.engine_health import EngineEndedError, EngineHealth


def server(ended):
    return SimpleNamespace(qerl_ended=SimpleNamespace(remote=lambda: ended))


@pytest.fixture
def make(bare_trainers, monkeypatch):
    """A trainer of verl's registry with two engines, without a cluster; `answers` are what they say."""
    monkeypatch.setattr(engine_health, "ray", SimpleNamespace(get=lambda answers, timeout: answers))

    def build(**nodes):
        kwargs = {"custom": None, "calculate_log_probs": True, "engine_kwargs": {"vllm": {}}}
        nodes |= {"actor_rollout_ref": {"rollout": {"name": "vllm", **kwargs}}, "algorithm": {}}
        config = OmegaConf.create(nodes | {"trainer": {"v1": {"trainer_mode": "sync"}}})
        made = get_trainer_cls("sync")(config)
        made.features = [feature for feature in made.features if isinstance(feature, EngineHealth)]
        made.run.servers = lambda: [server(answer) for answer in made.answers]
        made.answers = [False, False]
        return made

    return build


@pytest.fixture
def trainer(make):
    return make(aqn={"enabled": True})


@pytest.mark.parametrize("name", ["step", "_validate", "on_step_end", "on_validate_begin", "on_validate_end"])
def test_fit_has_what_may_wait_for_an_engine(name):
    assert f"self.{name}(" in inspect.getsource(PPOTrainer.fit)


@pytest.mark.parametrize("name", ["fit", "on_init_end"])
def test_an_error_of_a_rollout_whose_engine_has_ended_names_that(trainer, monkeypatch, name):
    def fail(self, *args):
        raise RuntimeError("no materializable trajectories")

    owner = next(kind for kind in type(trainer).__mro__[2:] if name in vars(kind))  # of verl's
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match=r"^no materializable"):
        getattr(trainer, name)()
    trainer.answers = [False, True]
    with pytest.raises(EngineEndedError, match=r"^vLLM's engine has ended in 1 of 2 rollout replicas; ") as raised:
        getattr(trainer, name)()
    assert str(raised.value.__cause__) == "no materializable trajectories"


def test_a_rollout_that_an_engine_left_in_parts_makes_no_update(trainer):
    slept = []
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: slept.append(1))
    trainer.curr_step_profile = False
    trainer.on_sample_end()
    assert slept == [1]
    trainer.answers = [True, True]
    with pytest.raises(EngineEndedError, match="in 2 of 2"):
        trainer.on_sample_end()
    assert slept == [1]


def test_groups_that_a_dead_engine_failed_are_not_replaced(trainer, monkeypatch):
    added = []
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, count: added.append(count))
    trainer._add_prompts_to_generate(2)
    trainer.answers = [False, True]
    with pytest.raises(EngineEndedError, match="in 1 of 2"):
        trainer._add_prompts_to_generate(3)
    assert added == [2]


def test_a_server_that_does_not_answer(trainer, monkeypatch):
    def late(answers, timeout):
        raise GetTimeoutError

    monkeypatch.setattr(engine_health, "ray", SimpleNamespace(get=late))
    with pytest.raises(EngineEndedError, match=r"^a rollout server does not answer any more \(GetTimeoutError\)\."):
        trainer.features[0].require_engines()


def test_servers_of_verls_own_and_runs_of_others_are_not_asked(trainer, make):
    trainer.run.servers = lambda: [SimpleNamespace()]
    trainer.features[0].require_engines()
    assert not make().features
