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
    results, logs = _files(folder)
    tail, missing = LOG_TAIL, list[Path]()
    while True:
        data = _archive(folder, results, logs, tail, missing)
        if len(data) <= limit:
            break
        if tail:
            tail = tail // 2 if tail > 1000 else 0
        else:
            results.sort(key=lambda path: path.stat().st_size)
            missing.append(results.pop())
    new = archive.with_name(archive.name + ".new")
    new.write_bytes(data)
    new.replace(archive)
    return len(data)


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    results, logs = [], []
    for place, _, names in os.walk(folder):  # which follows no links to folders
        for path in (Path(place, name) for name in names):
            if path.is_symlink():
                continue
            if path.suffix in _RESULTS:
                results.append(path)
            elif path.suffix == ".log":
                logs.append(path)
    return results, logs


def _archive(folder: Path, results: list[Path], logs: list[Path], tail: int, missing: list[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, most in [*((path, None) for path in results), *((path, tail) for path in logs)]:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # a run that ends renames its file
                file.seek(0 if most is None else max(0, path.stat().st_size - most))
                _add(tar, str(path.relative_to(folder)), file.read(most))
        if missing:
            _add(tar, "MISSING.txt", "\n".join(f"{path}: too large" for path in missing).encode())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
