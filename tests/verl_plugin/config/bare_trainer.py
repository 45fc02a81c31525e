"""Our trainer over nothing but the configuration of verl's: it leaves there what workers will read."""

from omegaconf import DictConfig

from verl_qerl.verl_plugin.trainer.trainer import NoiseMixin


class Base:
    def __init__(self, config: DictConfig) -> None:
        self.config = config


class Trainer(NoiseMixin, Base):
    pass
