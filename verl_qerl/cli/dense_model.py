"""A model of transformers: in bf16, without its weights, and whether its class ties the head."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.model_config import read_config
from verl_qerl.errors import CheckpointFormatError


def empty_model(folder: Path) -> Any:
    """The dense bf16 model of transformers that a directory describes, without memory for its weights.

    Raises:
        CheckpointFormatError: transformers makes none of its config.json.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_qerl.cli.odd_values import ODD_VALUES

    content = read_config(folder)
    content.pop("quantization_config", None)
    try:
        config = AutoConfig.for_model(**content)
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    except (*ODD_VALUES, ArithmeticError, RuntimeError) as error:
        raise CheckpointFormatError(
            f"transformers makes no model of config.json in {folder} ({error!r:.300}). Values as it saves them are"
            " accepted. Download the model again."
        ) from error


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether embedding and head are one tensor; config.json may leave out what transformers, if there, has for it."""
    name, family = "tie_word_embeddings", config.get("model_type")
    if name not in config and isinstance(family, str) and find_spec("transformers"):
        from transformers import CONFIG_MAPPING

        if family in CONFIG_MAPPING:  # half of the classes have no such field
            return bool(getattr(CONFIG_MAPPING[family], name, False))
    return bool(config.get(name))
