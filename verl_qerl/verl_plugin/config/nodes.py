"""Nodes of a run's configuration as plain values. Imports nothing of verl, so that any hook may import it."""

from typing import Any

from omegaconf import OmegaConf


def plain(node: Any) -> Any:
    """A node with its interpolations resolved, as dictionaries and lists; anything else as it is."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
