"""`python -m verl_qerl <command>`: prepare, check and look at runs."""

import argparse
import importlib
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence

from verl_qerl import __version__
from verl_qerl.cli.interrupts import Interrupted, kept_interrupts

# Command -> module with its add_parser(subparsers), which imports what is slow only when the command runs.
_COMMANDS = {
    "quantize": "quantize.arguments",
    "export": "export.arguments",
    "doctor": "doctor",
    "data": "data.command",
    "plot": "plot.command",
    "tune": "tune.arguments",
    "plan": "plan",
    "eval": "eval.arguments",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None takes them from the process.

    Returns:
        The exit code: 0 when it worked, 1 when the command says something is off, 2 for wrong arguments,
        128 and the number of a signal after an interrupt, or where the reader of the output has gone.
    """
    parser = argparse.ArgumentParser(prog="python -m verl_qerl", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)

    def run() -> int:
        args = _parse(parser, sys.argv[1:] if argv is None else argv)
        return args.run(args)

    return run_guarded(parser, run)


def run_guarded(parser: argparse.ArgumentParser, run: Callable[[], int]) -> int:
    """Call `run`, a command or a script of the recipes; bad input ends the program with one sentence.

    It begins with the parser's `prog`. For the exit code see `main`.
    """
    if sys.stderr is None:  # closed: tqdm would fail
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name may be in another encoding
    try:
        with kept_interrupts():
            code = run()
            print(end="", flush=True)  # what is at the exit comes too late for a sentence
            return code
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at the exit would fail
            parser.exit(128 + signal.SIGPIPE)  # as a shell reports it
        # What a user can mend is said in one sentence; anything else keeps its traceback.
        parser.exit(1, f"{parser.prog}: {_sentence(error)}\n")
    except KeyboardInterrupt as interrupt:
        sys.unraisablehook = lambda _: None  # tqdm's bar prints a traceback where it goes half made
        number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
        parser.exit(128 + number, f"{parser.prog}: {str(interrupt) or 'interrupted'}\n")  # as a shell reports it


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command that is named, whose module alone is imported; of all where none is."""
    subparsers = parser.add_subparsers(required=True, metavar="command")
    home = os.path.expanduser("~")
    argv = [re.sub("^(--[a-z-]+=)~(?=/|$)", lambda found: found[1] + home, one) for one in argv]  # a shell leaves it
    for one in argv:
        value = re.sub("^--[a-z-]+=", "", one)
        if not value:  # a path would be the working directory
            raise ValueError(
                f"an argument is empty: {one!r}. One that says something is accepted. Is a variable not set?"
            )
        if re.fullmatch(r"[a-z0-9]+://\S*", value):
            raise ValueError(
                f"no file or directory: {value}. A path of this machine, or of a model its id on the hub, is accepted."
                " Download what is read there, and upload what is written."
            )
    named = argv[0] if argv else None
    for name in (named,) if named in _COMMANDS else _COMMANDS:
        importlib.import_module(f"verl_qerl.cli.{_COMMANDS[name]}").add_parser(subparsers)
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # argparse would show the usage of the program, not of the command
        command = f"{parser.prog} {named}" if named in _COMMANDS else parser.prog
        told = f"no such argument: {' '.join(unknown)}. Accepted are those that `{command} --help` lists."
        parser.exit(2, f"{parser.prog}: {told}\n")
    return args


def _reader_has_gone() -> bool:
    """Whether nobody reads our output any more, as after `| head`; other pipes may break too."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))  # errors are told without being asked for


def _sentence(error: ValueError | OSError) -> str:
    if not isinstance(error, OSError) or error.errno is None:  # ours say it all
        return str(error)
    return (
        f"a file or directory cannot be used: {error.filename or 'its name is not known'} ({error.strerror}). One that "
        "this account may use, on a disk with room, is accepted. Change the path or the disk."
    )
