"""A node of ours that is misspelled: Hydra's `+` takes any name, and nothing would read it."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from omegaconf import DictConfig

from verl_qerl.algos.acr import ACRConfig
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.algos.mismatch import MismatchConfig
from verl_qerl.algos.uaq import UAQConfig
from verl_qerl.formats import FORMATS

# Node -> names of its options, or of its files in config/.
_NODES = {
    **{
        node: {field.name for field in fields(options)}
        for node, options in (("aqn", AQNConfig), ("acr", ACRConfig), ("qerl", MismatchConfig), ("uaq", UAQConfig))
    },
    "rollout": set(FORMATS),
    "platform": {"cpu"},
}


def check_spelling(config: DictConfig) -> None:
    """Refuse a top-level node that is nearly one of ours and holds what only ours do; others are the user's own.

    Args:
        config: Of the whole run.

    Raises:
        ValueError: There is one.
    """
    for name in map(str, config):
        near = get_close_matches(name, _NODES, n=len(_NODES), cutoff=0.6) if name not in _NODES else []
        value = config[name]
        held = set(value) if isinstance(value, Mapping) else {str(value)}
        meant = [node for node in near if held and held <= _NODES[node]]
        if meant:
            raise ValueError(
                f"unknown option +{name}: nothing reads it. Known are {', '.join(f'+{node}' for node in _NODES)}."
                f" Write {' or '.join(f'+{node}' for node in meant)}."
            )
