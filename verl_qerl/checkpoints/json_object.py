"""The JSON that describes a model or a checkpoint: config.json and its kind hold one object each."""

import json
from pathlib import Path
from typing import Any

from verl_qerl.errors import CheckpointFormatError


def read_object(path: Path, remedy: str = "Download the model again.") -> dict[str, Any]:
    """The object that a file holds.

    Args:
        remedy: Last sentence of the error for a damaged one.

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
