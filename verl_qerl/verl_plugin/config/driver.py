"""What runs on the driver, before verl starts Ray: the configuration of the whole run is looked at."""

import logging
from types import ModuleType

from verl_qerl import upstream
from verl_qerl.errors import UpstreamDriftError
from verl_qerl.verl_plugin.shims import CONFIG_CHECK

logger = logging.getLogger(__name__)


def install(module: ModuleType) -> None:
    """Have verl ask the policy loss, the gate, AQN, UAQ, the options of the rollout and the CPU platform.

    Where verl is not as expected, our trainer refuses the same, after Ray started.
    """
    try:
        upstream.install(CONFIG_CHECK)
    except UpstreamDriftError as error:
        logger.warning("options of ACR, UAQ and the gate are checked only after Ray has started: %s", error)
