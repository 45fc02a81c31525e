"""Processes of bench_rollout.py: one for each engine, since an engine does not give its memory back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Starter:
    """Starts engines in processes that were made, and have imported vLLM, while the one before still measures.

    Args:
        work: Folder of models, adapters, and of what the engines print.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self._next: tuple[subprocess.Popen, Path, Path] | None = None
        self._count = 0

    def __enter__(self) -> "Starter":
        self.work.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            kill(self._next[0])

    def prepare(self) -> None:
        """Make the next process, if there is none."""
        if self._next is None:
            self._count += 1
            job, log = self.work / f"engine-{self._count}.json", self.work / f"engine-{self._count}.log"
            with open(log, "w") as file:
                self._next = (spawn(job, file), job, log)

    def start(self, job: dict[str, Any]) -> tuple[subprocess.Popen, Path]:
        """Give a process its job. The process, and the file of what it prints."""
        self.prepare()
        assert self._next is not None
        process, path, log = self._next
        self._next = None
        path.write_text(json.dumps(job))
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it died while it imported: `follow` sees that
                process.stdin.write(b"\n")
                process.stdin.close()
        return process, log


def spawn(job: Path, log: Any) -> subprocess.Popen:
    """rollout_engine.py, which reads `job` once its standard input says so."""
    # This checkout first: what is measured is the package beside this file.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    script = Path(__file__).with_name("rollout_engine.py")
    command = [sys.executable, str(script), str(job)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
    # A session of its own: its workers go with it.
    return subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)


def kill(process: subprocess.Popen) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def follow(
    process: subprocess.Popen, events: Path, seconds: float, take: Callable[[dict[str, Any]], bool]
) -> tuple[bool, int | None]:
    """Give every event of an engine to `take`, which tells the last one.

    Returns:
        Whether the engine came to its end, and its exit code or None if it was killed after `seconds`.
    """
    end = time.monotonic() + seconds
    code, killed, done = None, False, False
    try:
        with open(events) as file:
            rest = ""
            while True:
                code = process.poll()  # before reading: what it wrote last is then seen
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    done = take(json.loads(line)) or done
                if code is not None:
                    return done, None if killed else code
                if time.monotonic() > end and not killed:
                    kill(process)
                    killed = True
                time.sleep(0.2)
    finally:
        kill(process)
