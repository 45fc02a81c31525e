"""An output directory that appears whole or not at all."""

import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_qerl.cli.interrupts import kept_interrupts

logger = logging.getLogger(__name__)


def check_absent(path: Path, ours: Path | None = None) -> None:
    """Refuse to write over earlier output; worth calling before long work.

    Args:
        path: Of the output.
        ours: What may be in it.

    Raises:
        FileExistsError: `path` is a file or a directory with something in it.
    """
    found = next((other for other in path.iterdir() if other != ours), None) if path.is_dir() else None
    if found or path.is_file():
        raise FileExistsError(
            f"the output already exists: out={path}{f' with {found.name}' if found else ''}. A new or empty directory "
            "is accepted. Choose another."
        )


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill, and make it `path` when the block ends without an error.

    It lies beside `path` and gets its name; an empty directory that is there is filled by what it holds, and stays:
    it may be a mount point, the working directory of a shell, or in a folder that only others may write to.

    Raises:
        FileExistsError: As `check_absent`.
        KeyboardInterrupt: An interrupt, with a sentence that says what it left.
    """
    check_absent(path)
    real = path.resolve()  # `.` has no name, and a link stays one
    folder = real if real.is_dir() else real.parent
    folder.mkdir(parents=True, exist_ok=True)
    for stale in sorted(folder.glob(f".{glob.escape(real.name)}.*.partial")):
        logger.warning("%s is of a run that was killed, or still writes. If none does, remove it.", stale)
    partial = Path(tempfile.mkdtemp(prefix=f".{real.name}.", suffix=".partial", dir=folder))
    try:
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private
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
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when the rename happened


def _move_up(partial: Path) -> None:
    """Move what `partial` holds to where it lies, all or nothing."""
    names = sorted(os.listdir(partial))
    try:
        for name in names:
            os.replace(partial / name, partial.parent / name)
    except BaseException:
        for name in names:
            if (partial.parent / name).exists():
                os.replace(partial.parent / name, partial / name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
