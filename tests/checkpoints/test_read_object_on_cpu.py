from pathlib import Path

import pytest

from verl_qerl.checkpoints.model_config import read_config, read_object
from verl_qerl.errors import CheckpointFormatError


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1]}')
    assert read_object(tmp_path / "config.json") == {"a": [1]}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "is not JSON: Expecting"),
        (b"\xff\xfe", "is not JSON: 'utf-8' codec"),
        (b"[]", "holds a list"),
        (b"null", "holds a NoneType"),
    ],
)
def test_what_holds_no_object_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=rf"config\.json {told}.*\. A JSON object is accepted\. Mend it\."):
        read_object(path, "Mend it.")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"num_hidden_layers": "x"}', r"num_hidden_layers='x'\. A whole number is accepted"),
        ('{"hidden_size": [1]}', r"hidden_size=\[1\]\. A whole number is accepted"),
        ('{"architectures": 3}', r"architectures=3\. A list is accepted"),
        ('{"mlp_only_layers": true}', r"mlp_only_layers=True\. A list is accepted"),
    ],
)
def test_an_entry_of_another_kind_is_named(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointFormatError, match=rf"config\.json cannot be used: {told}\. Download the model again"):
        read_config(tmp_path)


def test_an_entry_may_be_null(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"head_dim": null, "hidden_size": 8}')
    assert read_config(tmp_path) == {"head_dim": None, "hidden_size": 8}


@pytest.mark.parametrize("name", ["none", "file"])
def test_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CheckpointFormatError, match=rf"{name}/config\.json does not exist\. A directory in"):
        read_object(tmp_path / name / "config.json")
