"""verl's first trainer (`trainer.use_v1=False`) knows none of our options; say so instead of training without them."""

import sys
from types import ModuleType

from verl_qerl import verl_plugin


def install(module: ModuleType) -> None:
    """Stop the program if it asks for QeRL.

    Raises:
        SystemExit: The command line sets one of our options.
    """
    if verl_plugin.asks_for_qerl(sys.argv):
        raise SystemExit(
            "trainer.use_v1=False has no AQN, no ACR, no UAQ, no NVFP4, no gate and no additional_config.verl_qerl."
            " Accepted is True. Leave the option out."
        )
