"""`python -m verl_qerl <command>`: prepare, check and look at runs."""

import argparse
import importlib
import signal
from collections.abc import Sequence

from verl_qerl import __version__
from verl_qerl.cli.interrupts import Interrupted, kept_interrupts

# Each module has add_parser(subparsers) and imports what is slow only when it runs.
_COMMANDS = ("quantize", "export", "doctor", "data", "pretrain", "plot", "compare", "tune", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None takes them from the process.

    Returns:
        The exit code: 0 when it worked, 1 when the command says something is off, 2 for wrong arguments,
        128 and the number of a signal after an interrupt.
    """
    parser = argparse.ArgumentParser(prog="python -m verl_qerl", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name in _COMMANDS:
        importlib.import_module(f"verl_qerl.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        with kept_interrupts():
            return args.run(args)
    except (ValueError, OSError) as error:
        # What a user can mend is said in one sentence; anything else keeps its traceback.
        parser.exit(1, f"{parser.prog}: {_sentence(error)}\n")
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
        parser.exit(128 + number, f"{parser.prog}: {str(interrupt) or 'interrupted'}\n")  # as a shell reports it


def _sentence(error: ValueError | OSError) -> str:
    if not isinstance(error, OSError) or error.errno is None:  # ours say it all
        return str(error)
    return (
        f"a file or directory cannot be used: {error.filename or 'its name is not known'} ({error.strerror}). One that "
        "this account may use, on a disk with room, is accepted. Change the path or the disk."
    )
