"""Programs of verl that do not know our options are refused, since they would train without them."""

import sys
from types import ModuleType

from verl_qerl.verl_plugin.config.uses_qerl import asks_for_qerl

# Packages whose programs have trainers of their own and do not check the configuration on the driver.
PROGRAMS = ("verl.experimental.one_step_off_policy", "verl.experimental.fully_async_policy")


def install(module: ModuleType) -> None:
    """Stop a program of `module`, one of PROGRAMS, if it asks for QeRL.

    Raises:
        SystemExit: The command line sets one of our options.
    """
    if asks_for_qerl(sys.argv):
        raise SystemExit(
            f"{module.__name__} has no AQN, no ACR, no UAQ, no NVFP4, no gate and no +qerl.rollout. Accepted is"
            " verl.trainer.main_ppo. Start that, or leave these options out."
        )
