"""An output directory, or file, that appears whole or not at all."""

import errno
import fcntl
import glob
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl_qerl.cli.interrupts import kept_interrupts

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST = platform.node()[:32] or "localhost"  # in names, which a file system limits


def check_absent(path: Path, ours: Path | None = None) -> None:
    """Raise FileExistsError rather than write over earlier output; worth calling before long work.

    Args:
        ours: What may be in it.
    """
    dead = _left_by_the_dead(path, path.resolve().name) if path.is_dir() else []
    found = next((x for x in path.iterdir() if x != ours and x not in dead), None) if path.is_dir() else None
    if found or path.is_file():
        raise FileExistsError(
            f"the output already exists: out={path}{f' with {found.name}' if found else ''}. A new or empty directory "
            "is accepted. Choose another."
        )


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill, and make it `path` when the block ends without an error.

    It lies beside `path` and gets its name; what a killed run left of that is removed. An empty directory that is there
    is filled by what it holds, and stays: it may be a mount point, the working directory of a shell, or in a folder
    that only others may write to.

    Raises:
        FileExistsError: See `check_absent`.
        KeyboardInterrupt: An interrupt, with a sentence that says what it left.
    """
    check_absent(path)
    real = path.resolve()  # `.` has no name, and a link stays one
    folder = real if real.is_dir() else real.parent
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_directory(folder, real.name) as partial, full_disk_named(path):
        try:
            with kept_interrupts():
                yield partial
            check_absent(real, partial)
            if folder == real:
                _move_up(partial)
            else:
                os.replace(partial, real)
        except KeyboardInterrupt as interrupt:
            interrupt.args = (f"interrupted; {path} was not written",)
            raise


@contextmanager
def scratch_directory(folder: Path, name: str) -> Iterator[Path]:
    """Give a directory in `folder` as long as the block lasts; what killed runs left of one of that name is removed."""
    _remove_stale(folder, name)
    partial = folder / f".{name}.{_HOST}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
    except OSError as error:
        error.filename = str(folder / name)  # nobody knows of the other
        raise
    lock = _lock(partial)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it was renamed
        if lock is not None:
            os.close(lock)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep a directory, which is made if it is absent, for this process as long as the block lasts.

    Raises:
        FileExistsError: Another process has it.
    """
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _lock(folder, wait=False)
    except BlockingIOError as error:
        raise FileExistsError(
            f"another process writes into out={folder}. One at a time is accepted. Wait for its end, or choose another"
            " directory."
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Give an error of a full disk, or of a quota, the path that it lacks where a file was open already."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a file to write, and make it `path` when the block ends without an error; on one nothing is changed.

    What is no file, as a pipe, is given as it is.
    """
    real = path.resolve()  # a link stays one
    is_file = path.is_file() or not path.exists()
    partial = real.with_name(f".{real.stem[:32]}.{uuid.uuid4().hex[:8]}.partial{real.suffix}") if is_file else path
    try:
        yield partial
        if is_file:
            os.replace(partial, real)
    except OSError as error:
        error.filename = str(path)  # a full disk names none
        raise
    finally:
        if is_file and partial.exists():  # a read-only disk refuses to remove what is not there
            partial.unlink()


def _remove_stale(folder: Path, name: str) -> None:
    """Remove what killed runs left of an output, and name what may be of a run that still writes."""
    dead = _left_by_the_dead(folder, name)
    for stale in sorted(folder.glob(f".{glob.escape(name)}.*.partial")):
        if stale in dead:
            shutil.rmtree(stale, ignore_errors=True)
            logger.warning("removed %s, which a run that was killed had left.", stale)
        else:
            logger.warning("%s is of a run that was killed, or still writes. If none does, remove it.", stale)


def _left_by_the_dead(folder: Path, name: str) -> list[Path]:
    """Partial outputs that nobody holds: a lock ends with its process. Of this machine, which alone knows its locks."""
    dead = []
    for partial in folder.glob(f".{glob.escape(name)}.{glob.escape(_HOST)}.*.partial"):
        try:
            # One that is empty may be about to be locked.
            lock = _lock(partial, wait=False) if any(partial.iterdir()) else None
        except BlockingIOError:
            continue
        if lock is not None:
            dead.append(partial)
            os.close(lock)
    return dead


def _lock(folder: Path, wait: bool = True) -> int | None:
    """The descriptor that holds the lock of a directory until it is closed; None where the file system has no locks.

    Raises:
        BlockingIOError: Another process has it, and this one does not wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _move_up(partial: Path) -> None:
    """Move what `partial` holds to where it lies, all or nothing."""
    with ExitStack() as undo:
        for name in sorted(os.listdir(partial)):
            undo.callback(_move_back, partial, name)  # before it is moved: an interrupt may come right behind
            os.replace(partial / name, partial.parent / name)
        undo.pop_all()


def _move_back(partial: Path, name: str) -> None:
    if not (partial / name).exists():
        os.replace(partial.parent / name, partial / name)
