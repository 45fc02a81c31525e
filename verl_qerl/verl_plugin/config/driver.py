"""What runs on the driver, before verl starts Ray: the configuration of the whole run is looked at."""

import logging
import sys
from types import ModuleType

from verl_qerl import upstream
from verl_qerl.errors import UpstreamDriftError
from verl_qerl.verl_plugin.config.old_spellings import check_arguments
from verl_qerl.verl_plugin.shims import CONFIG_CHECK

logger = logging.getLogger(__name__)


def install(module: ModuleType) -> None:
    """Have verl check our options with its own; where it is not as expected our trainer does, after Ray started.

    Raises:
        SystemExit: The command line has an option under an old name, which Hydra would only call unknown.
    """
    try:
        check_arguments(sys.argv[1:])
    except ValueError as error:
        raise SystemExit(str(error)) from error
    try:
        upstream.install(CONFIG_CHECK)
    except UpstreamDriftError as error:
        logger.warning("options of verl_qerl are checked only after Ray has started: %s", error)
