"""What of a folder of results is worth fetching, in one small file: numbers, pictures, and the end of each log."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

LIMIT = 12 << 20
LOG_TAIL = 200_000
_RESULTS = {".json", ".jsonl", ".part", ".png"}


def pack(folder: Path, archive: Path, limit: int = LIMIT) -> int:
    """Write `archive`, which is the old one or the new one at any time.

    Logs are cut to their ends, further ones the more there are; results that do not fit beside each other are left out,
    the largest first, and named in MISSING.txt. Neither links nor other kinds of files, as weights are, are taken.

    Args:
        folder: What is packed, with its subfolders.
        archive: The .tar.gz; may lie in `folder`.
        limit: Bytes that it may have.

    Returns:
        Its size in bytes.
    """
    results, logs = _contents(folder)
    tail, missing = LOG_TAIL, list[str]()
    while True:
        notes = {"MISSING.txt": "\n".join(f"{name}: too large" for name in missing).encode()} if missing else {}
        data = _archive(results | {name: text[max(0, len(text) - tail) :] for name, text in logs.items()} | notes)
        if len(data) <= limit:
            break
        if tail:
            tail = tail // 2 if tail > 1000 else 0
        else:
            missing.append(max(results, key=lambda name: len(results[name])))
            del results[missing[-1]]
    new = archive.with_name(archive.name + ".new")
    new.write_bytes(data)
    new.replace(archive)
    return len(data)


def _contents(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(results, ends of logs) by their names in the folder."""
    results, logs = {}, {}
    for place, _, names in os.walk(folder):  # which follows no links to folders
        for path in (Path(place, name) for name in names):
            kind = results if path.suffix in _RESULTS else logs if path.suffix == ".log" else None
            if kind is None or path.is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # a run that ends renames its file
                if kind is logs:
                    file.seek(max(0, path.stat().st_size - LOG_TAIL))
                kind[str(path.relative_to(folder))] = file.read(LOG_TAIL if kind is logs else -1)
    return results, logs


def _archive(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
