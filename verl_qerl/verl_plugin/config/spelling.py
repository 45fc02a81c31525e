"""Names that Hydra takes and nothing of ours reads: misspelled nodes, and all but the last of several formats."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from verl_qerl.algos.acr import ACRConfig
from verl_qerl.algos.aqn import AQNConfig
from verl_qerl.algos.uaq import UAQConfig
from verl_qerl.formats import FORMATS
from verl_qerl.options.schema import Qerl

logger = logging.getLogger(__name__)

# Node -> names of its options, or of its files in config/.
_NODES = {kind.NODE: {field.name for field in fields(kind)} for kind in (AQNConfig, ACRConfig, UAQConfig, Qerl)}
_NODES |= {"rollout": set(FORMATS), "platform": {"cpu"}}


def check_spelling(config: DictConfig) -> None:
    """In a run of ours, warn of a top-level node whose name is nearly one of ours and that holds options of ours.

    A node of the user's own may look like that, so that the run goes on.

    Raises:
        ValueError: The command line names several formats, of which Hydra takes the last without a word.
    """
    for override in HydraConfig.get().overrides.task if HydraConfig.initialized() else ():
        group, _, formats = override.lstrip("+").partition("=")
        if group == "rollout" and "," in formats:
            raise ValueError(
                f"+rollout={formats} names several formats. One is accepted, for all linears; qerl.base.ignore leaves"
                " some in bf16. Name one."
            )
    for name in map(str, config):
        near = get_close_matches(name.lower(), _NODES, n=len(_NODES), cutoff=0.6) if name not in _NODES else []
        value = config[name]
        held = set(value) if isinstance(value, Mapping) else {str(value)}
        meant = [node for node in near if held and held <= _NODES[node]]
        node, _, option = name.partition("_")
        if option in _NODES.get(node, ()):
            meant = [f"{node}.{option}"]
        if name == "rollout":  # files, which leave no node of this name: `+rollout.format=nvfp4`
            meant = [f"rollout={form}" for form in FORMATS]
        if meant:
            logger.warning(
                "+%s looks like a misspelled option of verl_qerl, which does not read it. If it is meant for verl_qerl,"
                " stop the run and write %s. If it is an option of your own, nothing is to be done: the run goes on.",
                name,
                " or ".join(f"+{node}" for node in meant),
            )
