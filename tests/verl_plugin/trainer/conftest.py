import pytest


@pytest.fixture(scope="session", autouse=True)
def ours_takes_part():
    """verl's registries hold our trainers and our loss, as in a run with an option of ours."""
    pytest.importorskip("verl")
    from verl_qerl import verl_plugin

    verl_plugin.activate()


@pytest.fixture
def bare_trainers(monkeypatch):
    """verl's trainers hold their configuration and nothing else: no workers, no data."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))
