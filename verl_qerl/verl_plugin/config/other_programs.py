"""Programs and trainers of verl that do not know our options are refused, since they would train without them."""

import sys
from types import ModuleType

from omegaconf import DictConfig

from verl_qerl.verl_plugin.config.uses_qerl import asks_for_qerl

# Packages whose programs have trainers of their own and do not check the configuration on the driver.
PROGRAMS = ("verl.experimental.one_step_off_policy", "verl.experimental.fully_async_policy")
_LACKS = "has no AQN, no ACR, no UAQ, no NVFP4, no gate and no +qerl.rollout."


def install(module: ModuleType) -> None:
    """Stop a program of `module`, one of PROGRAMS, if it asks for QeRL.

    Raises:
        SystemExit: The command line sets one of our options.
    """
    if asks_for_qerl(sys.argv):
        raise SystemExit(
            f"{module.__name__} {_LACKS} Accepted is verl.trainer.main_ppo. Start that, or leave these options out."
        )


def check_trainer(config: DictConfig) -> None:
    """Refuse verl's first trainer in a run with an option of ours.

    Raises:
        ValueError: `trainer.use_v1` is false.
    """
    if not config.trainer.get("use_v1", True):
        raise ValueError(f"trainer.use_v1=False {_LACKS} Accepted is True. Leave the option out.")
