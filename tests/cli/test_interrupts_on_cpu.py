"""What an interrupt becomes in code that takes the exception away, as torch's `asarray` of a storage does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from verl_qerl.cli import plan
from verl_qerl.cli.interrupts import kept_interrupts
from verl_qerl.cli.output_dir import new_directory

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shell starts background jobs, and so what they start, deaf to SIGINT; the others would end the tests."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _interrupted_inside_an_extension(number: int = signal.SIGINT) -> None:
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'") from None


def test_another_error_made_of_an_interrupt_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        _interrupted_inside_an_extension()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_swallowed_interrupt_comes_at_the_end():
    reached = False
    with pytest.raises(KeyboardInterrupt), kept_interrupts():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            reached = True
    assert reached


def test_other_errors_stay_what_they_are():
    with pytest.raises(ValueError, match=r"^wrong$"), kept_interrupts():
        raise ValueError("wrong")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", SIGNALS)
def test_an_ignored_signal_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with kept_interrupts():
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("number", SIGNALS)
def test_nothing_is_left_and_it_is_said(tmp_path, number):
    with (
        pytest.raises(KeyboardInterrupt, match=r"^interrupted; .*out was not written$"),
        kept_interrupts(),
        new_directory(tmp_path / "out"),
    ):
        _interrupted_inside_an_extension(number)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_ends_as_a_shell_reports_its_signal(monkeypatch, tmp_path, refused, number, code):
    def run(args):
        with new_directory(tmp_path / "out"):
            _interrupted_inside_an_extension(number)

    monkeypatch.setattr(plan, "run", run)
    said = refused("plan", "--model", "m", "--gpu-gib", "1", code=code)
    assert said == f"python -m verl_qerl: interrupted; {tmp_path / 'out'} was not written\n"


_HALF_MADE = """
import argparse, os, signal
from tqdm import tqdm
from verl_qerl.cli import run_guarded

class Interrupted(tqdm):
    @classmethod
    def _get_free_pos(cls, instance=None):  # tqdm.__init__ calls it before tqdm.__del__ can work
        signal.raise_signal(signal.SIGTERM)

run_guarded(argparse.ArgumentParser(prog="program"), lambda: Interrupted(total=1))
"""


def test_a_bar_that_is_half_made_prints_no_traceback():
    result = subprocess.run([sys.executable, "-c", _HALF_MADE], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (143, "program: interrupted\n")
