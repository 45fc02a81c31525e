"""What the rollout side says once, though many layers or steps would."""

import functools
import logging

logger = logging.getLogger(__name__)


@functools.cache
def say_once(message: str) -> None:
    """Log a warning unless it was logged before."""
    logger.warning("verl_qerl: %s", message)
