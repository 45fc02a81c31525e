"""config.json of a model, and the other files that hold one JSON object."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_qerl.errors import CheckpointFormatError

# Entries that are read here and by the driver; in models that run here they are of these kinds, or left out.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "vocab_size")
_KINDS = {"architectures": list, "mlp_only_layers": list} | dict.fromkeys(_SIZES, int)
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configuration, tokenizer


def read_object(path: Path, remedy: str = "Download the model again.") -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        CheckpointFormatError: There is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointFormatError(
            f"{path} does not exist. A directory in Hugging Face layout is accepted. Check the path."
        ) from error
    except IsADirectoryError as error:
        raise CheckpointFormatError(
            f"{path} is a directory. A file with a JSON object is accepted. {remedy}"
        ) from error
    except ValueError as error:  # of JSON and of its encoding
        raise CheckpointFormatError(f"{path} is not JSON: {error}. A JSON object is accepted. {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{path} holds a {type(found).__name__}. A JSON object is accepted. {remedy}")
    return found


def read_config(model: str | Path) -> dict[str, Any]:
    """The object that config.json holds.

    Args:
        model: Directory, the file itself, or a hub id, of which this file alone is fetched.

    Raises:
        CheckpointFormatError: There is none, it cannot be reached or read, or an entry is of another kind.
    """
    path = local_path(model, config_only=True)
    if not path.exists():
        raise CheckpointFormatError(
            f"{path} does not exist. A directory in Hugging Face layout or a hub id, owner/name, is accepted. Check it."
        )
    path = path / "config.json" if path.is_dir() else path
    found = read_object(path)
    for name, kind in _KINDS.items():
        value = found.get(name)
        if value is not None and not isinstance(value, kind):
            accepted = "A list" if kind is list else "A whole number"
            raise CheckpointFormatError(
                f"{path} cannot be used: {name}={value!r}. {accepted} is accepted. Download the model again."
            )
    return found


def senses(config: Mapping[str, Any]) -> list[str]:
    """Names of the parts by which a model sees or hears; none in a model of text alone."""
    return [name for name in ("vision_config", "audio_config", "thinker_config") if config.get(name)]


def local_path(
    model: str | Path, revision: str | None = None, cache_dir: str | None = None, config_only: bool = False
) -> Path:
    """Where a model lies on this machine; a hub id, as verl and vLLM take it, is fetched into their cache.

    Args:
        model: Directory or file, which need not exist, or a hub id.
        revision: Branch, tag or commit of a hub id (default: main).
        cache_dir: Where a hub id is fetched to (default: Hugging Face's cache).
        config_only: Fetch config.json alone, and return it.

    Raises:
        CheckpointFormatError: The hub has no such model, or cannot be reached.
    """
    if Path(model).exists() or not is_hub_id(model):
        return Path(model)
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if config_only:
            return Path(hf_hub_download(str(model), "config.json"))
        return Path(snapshot_download(str(model), revision=revision, cache_dir=cache_dir, allow_patterns=_HUB_FILES))
    except hub_errors() as error:
        asked = f"{model} at revision {revision}" if revision else model
        raise CheckpointFormatError(
            f"{asked} is neither a directory nor a model of the hub that can be reached ({type(error).__name__})."
            " A directory in Hugging Face layout or a hub id is accepted. Check the name, or download it first."
        ) from error


def hub_errors() -> tuple[type[Exception], ...]:
    """What is raised where the hub cannot be reached, or has not what is fetched."""
    import httpx  # with the next, half a second to import
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    return HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, json.JSONDecodeError


def is_hub_id(model: str | Path) -> bool:
    """Whether a name has the form of a hub id, `owner/name`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(model)) is not None
