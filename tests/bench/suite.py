"""Every measurement that needs GPUs, in one go and within a time limit; suite_jobs.py has the jobs.

    python tests/bench/suite.py --out DIR --source DIR_WITH_GSM8K_JSONL --minutes 27
    python tests/bench/suite.py --out DIR --work OTHER_DIR --only base study --minutes 60
    python tests/bench/suite.py --list

Jobs start in their order (that of --only) as GPUs become free; none overtakes one that waits for GPUs. What needs
another job starts after it, small ones share GPUs with each other and with the study, and what has too little time left
is not begun. At the limit all are interrupted, and killed when they do not end. DIR has results as they come, logs/,
suite.json (what became of each job), host.jsonl (what the host was doing) and results.tar.gz, written anew every 20 s
and small whatever lies in DIR: what to fetch from a machine that goes away. Models and data go to --work.
Exit code 1 when a job failed or was not begun.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import suite_archive
import suite_host
import suite_jobs
from qerl_testing import current_commit
from suite_jobs import Job

ROOT = Path(__file__).parents[2]
MARK = "QERL_SUITE_JOB"  # in the environment of all that a job starts
SMALL = 3  # small jobs at a time on a GPU
PACK_S = 20
LAST_WORDS_S = 10  # pytest needs some to say what has failed


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    gpus: list[str]
    started: float
    folder: str  # Ray's


class Suite:
    """Runs jobs until all ended or the time is over.

    Args:
        jobs: In order; `after` names others of them.
        gpus: Names for CUDA_VISIBLE_DEVICES.
        work: Folder of models and data.
        source: GSM8K, as `data gsm8k --source` takes it.
    """

    def __init__(self, jobs: list[Job], gpus: list[str], seconds: float, out: Path, work: Path, source: str) -> None:
        self.jobs, self.gpus, self.out = jobs, gpus, out
        self.states = {job.name: "waiting" for job in jobs}
        self._seconds, self._start = seconds, time.monotonic()
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, dict[str, float]] = {}
        self._packed = 0.0
        self._host = suite_host.Host()
        paths = {"OUT": str(out), "WORK": str(work), "ROOT": str(ROOT), "SOURCE": source}
        self._env = os.environ | paths | {"QERL_COMMIT": current_commit()}
        # Each of Ray's clusters would end its own workers when all of them together fill the host.
        self._env |= {"RAY_memory_monitor_refresh_ms": "0"}
        for folder in (out / "logs", work):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Exit code of the command."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a suite in the background would ignore it
        try:
            while self._left() > 0:
                self._take_ended()
                self._start_what_can()
                if not self._running and not any(state == "waiting" for state in self.states.values()):
                    break
                self._pack()
                time.sleep(0.2)
        finally:
            self._interrupt()
            for name in list(self._running):
                self._end(name, "killed at the end")
            self.states |= {name: "not begun" for name, state in self.states.items() if state == "waiting"}
            self._pack(always=True)
        return int(any(state.startswith(("failed", "not begun")) for state in self.states.values()))

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._start)

    def _take_ended(self) -> None:
        for name, running in list(self._running.items()):
            code = running.process.poll()
            if code is not None:
                self._end(name, "done" if code == 0 else f"failed with {code}")

    def _start_what_can(self) -> None:
        for job in self.jobs:
            if self.states[job.name] != "waiting":
                continue
            reason = self._never(job)
            if reason:
                self._say(job.name, f"not begun: {reason}")
                continue
            if any(self.states[name] in ("waiting", "running") for name in job.after):
                continue
            gpus = self._gpus_for(job)
            if not gpus:
                return  # it waits for GPUs, and what follows waits for it
            self._spawn(job, gpus)

    def _never(self, job: Job) -> str:
        for name in job.after:
            if self.states[name] not in ("waiting", "running", "done"):
                return f"needs {name}, which is {self.states[name]}"
        if job.gpus > len(self.gpus):
            return f"needs {job.gpus} GPUs of {len(self.gpus)}"
        return f"{self._left():.0f} s are left of {job.seconds} s" if self._left() < job.seconds else ""

    def _gpus_for(self, job: Job) -> list[str]:
        """Those that it can have now; none when it has to wait."""
        there = {gpu: [running.job for running in self._running.values() if gpu in running.gpus] for gpu in self.gpus}
        small = {gpu: sum(other.small for other in others) for gpu, others in there.items()}
        if job.small:
            free = [gpu for gpu in self.gpus if all(other.small or other.shares for other in there[gpu])]
            free = sorted((gpu for gpu in free if small[gpu] < SMALL), key=lambda gpu: small[gpu])
        else:
            free = [gpu for gpu in self.gpus if not there[gpu]]
        wanted = job.gpus or len(self.gpus)
        return sorted(free[:wanted], key=self.gpus.index) if len(free) >= wanted else []

    def _spawn(self, job: Job, gpus: list[str]) -> None:
        # Ray's clusters of jobs that start at once would share a folder; the path of a socket must be short.
        folder = tempfile.mkdtemp(prefix="qs")
        own = {MARK: job.name, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "RAY_TMPDIR": folder}
        with open(self.out / "logs" / f"{job.name}.log", "w") as log:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", job.command],
                cwd=ROOT,
                env=self._env | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[job.name] = _Running(job, process, gpus, time.monotonic(), folder)
        self._say(job.name, "running", f" on {','.join(gpus)}")

    def _interrupt(self) -> None:
        """Let jobs say what they know; `pytest` names failures at its end alone."""
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGINT)
        end = time.monotonic() + LAST_WORDS_S
        for running in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, end - time.monotonic()))

    def _end(self, name: str, state: str) -> None:
        running = self._running.pop(name)
        running.process.kill()
        kill_marked(name)
        running.process.wait()
        shutil.rmtree(running.folder, ignore_errors=True)
        self._ended[name] = {
            "began_s": round(running.started - self._start, 1),
            "took_s": round(time.monotonic() - running.started, 1),
        }
        self._say(name, state)

    def _say(self, name: str, state: str, more: str = "") -> None:
        self.states[name] = state
        print(f"[{time.monotonic() - self._start:7.1f}] {name}: {state}{more}", flush=True)

    def _pack(self, always: bool = False) -> None:
        if not always and time.monotonic() - self._packed < PACK_S:
            return
        jobs = {name: {"state": state} | self._ended.get(name, {}) for name, state in self.states.items()}
        (self.out / "suite.json").write_text(json.dumps(jobs, indent=1) + "\n")
        with open(self.out / "host.jsonl", "a") as file:
            file.write(json.dumps(self._host.sample()) + "\n")
        size = suite_archive.pack(self.out, self.out / "results.tar.gz")
        self._packed = time.monotonic()
        if always:
            print(f"{self.out / 'results.tar.gz'}: {size / 2**20:.1f} MiB", flush=True)


def kill_marked(name: str) -> None:
    """End all processes of a job; Ray's leave the session and the tree of what started them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == name:
                process.kill()


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [job.name for job in suite_jobs.JOBS]
    parser.add_argument("--list", action="store_true", help="print the jobs and stop")
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "verl_qerl_suite")
    parser.add_argument("--source", default="openai/gsm8k", help="GSM8K: a folder with train.jsonl and test.jsonl")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="+", choices=names, metavar="JOB", help="in this order, and not what they need")
    args = parser.parse_args(arguments)
    if not args.list and not args.out:
        parser.error("--out is missing")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.list:
        for job in suite_jobs.JOBS:
            print(f"{job.name:21} {job.gpus or 'all'} GPUs, {job.seconds} s: {job.what}")
        return 0
    gpus = visible_gpus()
    if not gpus:
        print("no GPU is visible: CUDA_VISIBLE_DEVICES names none, or torch sees none. One or more is accepted.")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing that was started outlives it
    jobs = suite_jobs.selected(args.only)
    source = str(Path(args.source).resolve()) if Path(args.source).is_dir() else args.source
    return Suite(jobs, gpus, 60 * args.minutes, args.out.resolve(), args.work.resolve(), source).run()


if __name__ == "__main__":
    sys.exit(main())
