"""Rows of a file or of a data set of the hub, as dictionaries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def check_file(path: Path, name: str, accepted: str) -> None:
    """Require a file.

    Args:
        name: What the message calls the path.
        accepted: What may be in it, with its verb.
    """
    if not path.is_file():
        what = "a directory was given for a file" if path.is_dir() else "a file is missing"
        raise FileNotFoundError(f"{what}: {name}={path}. {accepted} accepted. Check the path.")


def read_jsonl(path: Path, required: Mapping[str, type], is_growing: bool = False) -> list[Row]:
    """Read one JSON object per line.

    Args:
        required: Keys that each has, and of what kind their values are.
        is_growing: The file may still be written: a last line that is cut short is left out, which is said.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line is not such an object, or there is none.
    """
    check_file(path, "path", "JSON lines are")
    rows = []
    lines = path.read_bytes().split(b"\n")  # JSON may hold U+2028
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # refuses half of a surrogate pair, which parquet cannot hold
        except (ValueError, RecursionError) as error:
            if is_growing and number == len(lines):
                print(f"left out of {path}: its last line, which is cut short")
                continue
            raise ValueError(f"line {number} is not JSON: path={path} ({error}). Mend or drop the line.") from error
        missing = [key for key in required if not isinstance(row, dict) or key not in row]
        if missing:
            raise ValueError(f"line {number} lacks {missing}: path={path}. Give each line {list(required)}.")
        check_kinds(row, required, f"line {number} of {path}")
        rows.append(row)
    if not rows:
        raise ValueError(f"a file is empty: path={path}. At least one line is accepted. Check the path.")
    return rows


def read_rows(path: Path, what: str, count: int | None = None) -> list[Row]:
    """The objects of JSON lines, or else of a JSON list or parquet.

    Args:
        what: `questions` or the like, for messages.
        count: So many at most, from the first.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It holds something else.
    """
    if path.suffix == ".jsonl":
        rows = read_jsonl(path, {})
    else:
        check_file(path, what, "JSON or parquet is")
        try:
            if path.suffix == ".json":
                rows = json.loads(path.read_text(encoding="utf-8-sig"))
            else:
                import pyarrow.parquet as pq

                rows = pq.read_table(path).slice(0, count).to_pylist()
        except (ValueError, OSError, RecursionError) as error:  # json's and pyarrow's are
            raise ValueError(
                f"{what} cannot be read: {path} ({error}). Objects, as JSON or parquet, are accepted. Download it"
                " again."
            ) from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{what} cannot be read: {path} holds no objects. A list of them, as JSON or parquet, is accepted. Download"
            " it again."
        )
    return rows[:count]


def columns_of(value: Any) -> Mapping[str, Any]:
    """The columns inside of a column; none where it holds something else."""
    return value if isinstance(value, Mapping) else {}


def check_kinds(row: Mapping[str, Any], required: Mapping[str, type], where: str) -> None:
    """Require values of these kinds, and text that is not blank; `where` names the row in the error."""
    for key, kind in required.items():
        value = row.get(key)
        if not isinstance(value, kind) or (isinstance(value, str) and not value.strip()):
            accepted = "str that is not blank" if kind is str else kind.__name__
            raise ValueError(f"{where} cannot be used: {key}={value!r}. Accepted is {accepted}. Mend or drop the row.")


def from_hub(name: str, split: str, config: str | None, option: str = "--source") -> list[Row]:
    """The rows of a split of a data set of the hub.

    Raises:
        ValueError: The hub does not answer; `option` is what takes a directory instead.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split).to_list()
    except ConnectionError as error:
        raise ValueError(f"the hub did not answer: source={name}. {error}. Give a directory with {option}.") from error
