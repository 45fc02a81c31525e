"""Nodes of a run's configuration as plain values. Imports nothing of verl, so that any hook may import it."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigTypeError


def plain(node: Any) -> Any:
    """A node with its interpolations resolved, as dictionaries and lists; anything else as it is."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def run_of(config: Any) -> Callable[[str], Any]:
    """The run as the table of rules reads it: name -> value, None where nothing is set."""

    def value(name: str) -> Any:
        try:
            return plain(OmegaConf.select(config, name))
        except ConfigTypeError:  # a list where the name has a group
            return None

    return value


def paths_are_here(config: Any) -> bool:
    """Whether the workers of a run are on this machine, and see its files."""
    elsewhere = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return not elsewhere and OmegaConf.select(config, "trainer.nnodes") == 1


def mapping(get: Callable[[str], Any], name: str) -> Mapping[str, Any]:
    """An argument of vLLM's that is a dictionary, or JSON of one as some scripts pass it; empty where there is none.

    Args:
        get: Name -> value, None where nothing is set.

    Raises:
        ValueError: The argument is neither.
    """
    value = get(name)
    try:
        found = {} if value in (None, "") else json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        found = value
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{name}={value} is no group of options. Accepted is a dictionary, or the text of one in JSON. Correct it."
        )
    return found
