"""What verl's trainer asks of the critic after a reference that is the actor without its adapter."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from verl_qerl.verl_plugin.trainer.critic import CriticMixin


def test_the_critic_is_not_asked_to_leave_out_an_adapter():
    from verl.trainer.ppo.v1 import trainer_base

    asked = []

    class Trainer(CriticMixin, trainer_base.PPOTrainer):
        def __init__(self):
            self.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(temperature=1.0)))
            self.critic_wg = SimpleNamespace(infer_batch=self.infer)

        def infer(self, batch):
            asked.append(dict(batch.extra_info))
            raise KeyboardInterrupt  # what follows reads the TransferQueue

        def on_sample_end(self): ...

        def on_step_end(self): ...

    with pytest.raises(KeyboardInterrupt):
        Trainer()._compute_values(SimpleNamespace(extra_info={"no_lora_adapter": True}), {})
    assert asked == [{"compute_loss": False, "temperature": 1.0}]


def test_verls_trainers_have_it():
    from verl.trainer.ppo import v1

    import verl_qerl.verl_plugin.trainer.trainer

    verl_qerl.verl_plugin.trainer.trainer.install(v1)
    assert all(issubclass(trainer, CriticMixin) for trainer in v1.trainer_base.TRAINER_REGISTRY.values())
