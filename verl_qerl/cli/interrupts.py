"""An interrupt ends a command as an interrupt, whatever it was in the middle of."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """End the block by KeyboardInterrupt once SIGINT came, also when something inside took the exception away.

    C++ code that calls Python may take any exception of it for an answer: torch, while it measures a storage for
    `torch.asarray`, makes "could not determine the shape of object type" out of an interrupt. For the main thread.

    Raises:
        KeyboardInterrupt: SIGINT came inside the block.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, as in the background jobs of a shell, or ending the process by itself
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
