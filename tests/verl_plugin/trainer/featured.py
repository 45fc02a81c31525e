"""A trainer with some of our features around a stand-in for verl's PPOTrainer."""

from types import SimpleNamespace

from verl_qerl.verl_plugin.trainer.trainer import FEATURES, FeaturedTrainer


class Base:
    """What features see of verl's PPOTrainer; `log` has what it does, in order."""

    def __init__(self, config):
        self.config, self.timing_raw, self.log, self.batch = config, {}, [], None
        self.global_steps, self.total_training_steps, self.steps_per_epoch = 0, 4, 1000
        self.replay_buffer = self._build_replay_buffer()

    def _build_replay_buffer(self):
        return SimpleNamespace(sample=lambda **_: (self.batch, {}))

    def _consume_sync_metrics(self):
        return {"weight_sync/seconds": 0.5}

    def on_init_end(self):
        self.log.append("sync")

    def on_step_end(self):
        self.log.append("sync")

    def on_sample_end(self):
        self.log.append("sleep")

    def on_validate_begin(self):
        self.log.append("validate")

    def on_validate_end(self):
        self.log.append("validated")

    def _save_checkpoint(self):
        self.log.append("saved")

    def _load_checkpoint(self):
        self.log.append("loaded")


def trainer_of(*features, base=Base):
    """The class of a trainer that has these features, where its configuration asks for them."""
    return type("Trainer", (FeaturedTrainer, base), {"FEATURES": {kind: FEATURES[kind] for kind in features}})
