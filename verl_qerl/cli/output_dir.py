"""An output directory that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_qerl.cli.interrupts import kept_interrupts


def check_absent(path: Path) -> None:
    """Refuse to write over earlier output; worth calling before long work.

    Raises:
        FileExistsError: `path` is a file or a directory with something in it.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(
            f"the output already exists: out={path}. A new or empty directory is accepted. Choose another."
        )


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill beside `path`, and rename it to `path` when the block ends without an error.

    Raises:
        FileExistsError: As `check_absent`.
        KeyboardInterrupt: An interrupt, with a sentence that says what it left.
    """
    check_absent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        with kept_interrupts():
            yield partial
        check_absent(path)
        os.replace(partial, path)  # also over an empty directory
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"interrupted; {path} was not written") from interrupt
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when the rename happened


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
