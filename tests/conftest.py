"""What tests of several folders share."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


class Owner:
    """A process that owns the packed base of a model and lends it (modules/lender.py)."""

    def __init__(self, model: Path, job: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "modules" / "lender.py"), str(model), job]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "lending\n"

    def tell(self, command: str):
        """Send a command; its answer."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def sockets(monkeypatch, tmp_path_factory):
    """Meeting places of this test alone; a path of pytest's may be too long for a socket."""
    tmp_path_factory.getbasetemp()  # pytest makes it on first use, and must not do so below
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def lend(sockets):
    """Starts an Owner; it ends with the test."""
    started = []

    def start(model: Path, job: str) -> Owner:
        started.append(Owner(model, job))
        return started[-1]

    yield start
    for owner in started:
        owner.kill()
