"""The interval of verl's own replay buffers in our trainers."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_qerl.verl_plugin.config.apply import prepare
from verl_qerl.verl_plugin.trainer.feature import Run
from verl_qerl.verl_plugin.trainer.mismatch import gate_options
from verl_qerl.verl_plugin.trainer.polling import POLL_S

VERLS = 2.0
SAMPLER = """
class Sampler:
    def __init__(self, **kwargs):
        {state}

    def sample(self, **kwargs):
        return None, {{}}
"""


def buffer_of(mode, sampler=None, **nodes):
    """What a trainer of verl's registry builds for a configuration."""
    chosen = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    config = {
        "trainer": {"v1": {"trainer_mode": mode, "sampler": chosen | {"custom_sampler": sampler}}},
        "algorithm": {},
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {
            "actor": {"strategy": "fsdp"},
            "rollout": {"name": "vllm", "calculate_log_probs": True, "engine_kwargs": {"vllm": {}}},
        },
        **nodes,
    }
    kind = get_trainer_cls(mode)
    trainer = kind.__new__(kind)
    trainer.config, trainer.trainer_mode = OmegaConf.create(config), mode
    prepare(trainer.config)
    trainer.run = Run(trainer, trainer.config, gate_options(trainer.config))
    return trainer._build_replay_buffer()


@pytest.mark.parametrize(("mode", "kind"), [("sync", ReplayBuffer), ("colocate_async", ReplayBufferAsync)])
@pytest.mark.parametrize("nodes", [{"aqn": {"enabled": True}}, {"qerl": {"gate": {"max_initial_kl": None}}}], ids=str)
def test_runs_of_ours_look_more_often(mode, kind, nodes):
    buffer = buffer_of(mode, **nodes)
    assert type(buffer) is kind
    assert buffer.poll_interval == POLL_S


@pytest.mark.parametrize(
    ("mode", "nodes"), [("sync", {}), ("separate_async", {"qerl": {"gate": {"max_initial_kl": None}}})], ids=str
)
def test_other_runs_keep_verls(mode, nodes):
    assert buffer_of(mode, **nodes).poll_interval == VERLS


@pytest.mark.parametrize(
    ("state", "expected"), [("self.poll_interval = 0.1", 0.1), ("self.poll_interval = 2.0", POLL_S), ("pass", None)]
)
def test_a_sampler_of_the_users(tmp_path, state, expected):
    path = tmp_path / "sampler.py"
    path.write_text(SAMPLER.format(state=state))
    buffer = buffer_of("sync", {"path": str(path), "name": "Sampler"}, aqn={"enabled": True})
    assert type(buffer).__name__ == "Sampler"
    assert getattr(buffer, "poll_interval", None) == expected
