"""What verl's trainer asks of the critic after a reference that is the actor without its adapter."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import load_beside

from verl_qerl.verl_plugin.trainer import trainer

featured = load_beside(__file__, "featured")


def test_the_critic_is_not_asked_to_leave_out_an_adapter(monkeypatch):
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.setattr(trainer, "with_tensors", lambda batch: batch)  # asks the TransferQueue
    asked = []

    class Stock(trainer_base.PPOTrainer):
        def __init__(self, config):
            self.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(temperature=1.0)))
            self.critic_wg = SimpleNamespace(infer_batch=self.infer)

        def infer(self, batch):
            asked.append(dict(batch.extra_info))
            raise KeyboardInterrupt  # what follows reads the TransferQueue

        def on_sample_end(self): ...

        def on_step_end(self): ...

    with pytest.raises(KeyboardInterrupt):
        featured.trainer_of(base=Stock)(OmegaConf.create({}))._compute_values(
            SimpleNamespace(extra_info={"no_lora_adapter": True}), {}
        )
    assert asked == [{"compute_loss": False, "temperature": 1.0}]
