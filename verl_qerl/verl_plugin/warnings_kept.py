"""Keeps our warnings visible where a host has silenced the root logger.

A package that vLLM's server imports (model_hosting_container_standards) sets the root logger and its handlers to ERROR,
in verl's trainer too. verl keeps its own loggers apart from the root for that reason, and ours need the same.
"""

import logging


class _WhereRootDrops(logging.StreamHandler):
    """Writes to stderr what no handler of the root takes; so that nothing is written twice."""

    def emit(self, record: logging.LogRecord) -> None:
        if all(record.levelno < handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def keep_warnings() -> None:
    """Write warnings of this package whatever happens to the root logger; a second call does nothing."""
    ours = logging.getLogger("verl_qerl")
    if any(isinstance(handler, _WhereRootDrops) for handler in ours.handlers):
        return
    handler = _WhereRootDrops()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.WARNING)
