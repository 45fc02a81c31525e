"""Programs of verl whose trainers know none of our options; say so instead of training without them."""

import sys
from types import ModuleType

from verl_qerl import verl_plugin

# Module -> (what asks for its trainer, what to do). All three have classes of verl's first trainer.
PROGRAMS = {
    "verl.trainer.main_ppo_v0": ("trainer.use_v1=False", "Accepted is True. Leave the option out."),
} | {
    name: (name, "Accepted is verl.trainer.main_ppo. Start that, or leave these options out.")
    for name in ("verl.experimental.one_step_off_policy", "verl.experimental.fully_async_policy")
}


def install(module: ModuleType) -> None:
    """Stop the program of `module` if it asks for QeRL.

    Raises:
        SystemExit: The command line sets one of our options.
    """
    if verl_plugin.asks_for_qerl(sys.argv):
        asked, then = PROGRAMS[module.__name__]
        raise SystemExit(
            f"{asked} has no AQN, no ACR, no UAQ, no NVFP4, no gate and no additional_config.verl_qerl. {then}"
        )
