"""SIGINT, SIGTERM and SIGHUP end a command wherever it is, and unfinished output is removed."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Of a key, of a scheduler or `docker stop`, and of a terminal that is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """One of these signals came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """End the block by KeyboardInterrupt once a signal came, also when something inside took the exception away.

    C++ code that calls Python may take any exception of it for an answer: torch, while it measures a storage for
    `torch.asarray`, makes "could not determine the shape of object type" out of an interrupt. For the main thread.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP came inside the block.
    """
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    # Without those that are ignored, as in the background jobs of a shell and under nohup, or that C code handles.
    before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    came = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = number
        raise Interrupted(number)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    except Exception as error:
        if came is not None:
            raise Interrupted(came) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came is not None:
        raise Interrupted(came)


def end_with_the_parent() -> None:
    """End this process when the one that started it ends, killed or not."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
