"""What tests of several folders share."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

# Hydra reads thirty files for each configuration that a test composes: a quarter of the time of such a test.
yaml.SafeLoader = yaml.CSafeLoader

TESTS = Path(__file__).parent
WARM = TESTS / "warm_python.py"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        if item.get_closest_marker("hopper") and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")


class Owner:
    """A process that owns the packed base of a model and lends it (modules/lender.py)."""

    def __init__(self, model: Path, job: str) -> None:
        command = [sys.executable, str(TESTS / "modules" / "lender.py"), str(model), job]
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
def without_flash_attn(monkeypatch) -> Iterator[None]:
    from verl_qerl.verl_plugin.config.attention import has_flash_attn

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    has_flash_attn.cache_clear()
    yield
    has_flash_attn.cache_clear()


@pytest.fixture
def quick_check(monkeypatch) -> None:
    """verl's check of a run without the seconds of vLLM's import, which it needs to round the rank of the adapter."""
    package = "verl.workers.rollout.vllm_rollout"
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.utils", SimpleNamespace(get_vllm_max_lora_rank=lambda rank: rank))


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


class WarmPython:
    """Runs programs in forks of a Python that has what is below verl imported (warm_python.py), one after the other.

    It is started when it is first needed, and again after it has been killed.

    Args:
        settings: Variables that what it imports reads; a program has those of its own environment.
    """

    def __init__(self, **settings: str) -> None:
        # Read at import, hence the same for all programs.
        self._settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | settings
        self._process: subprocess.Popen | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._starts = 0

    @property
    def socket(self) -> str:
        """Where processes ask for a fork to go on in (WARM_PYTHON of startup/sitecustomize.py)."""
        process = self._started()
        path = self._path()
        while not Path(path).exists() and process.poll() is None:
            time.sleep(0.05)
        return path

    @property
    def quick(self) -> dict[str, str]:
        """Variables with which processes need not import what is below verl (startup/sitecustomize.py).

        Nor do they compile vLLM's sampler, which takes up to eight seconds of a core.
        """
        return {"WARM_PYTHON": self.socket, "TORCH_COMPILE_DISABLE": "1"}

    def _path(self) -> str:
        return f"{self._folder.name}/{self._starts}"

    def _started(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | self._settings
            self._starts += 1
            command = [sys.executable, str(WARM), self._path()]
            self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def __call__(
        self, *arguments: str, env: dict[str, str], cwd: Path | str = ".", ranks: int = 1, timeout_s: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run `python <arguments>` on so many ranks; the output is that of all of them, the code that of a failure."""
        own = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {} for rank in range(ranks)]
        process = self._started()
        job = {"arguments": arguments, "cwd": str(Path(cwd).absolute()), "environments": [env | more for more in own]}
        with tempfile.TemporaryDirectory() as folder:
            process.stdin.write(json.dumps(job | {"output": folder}).encode() + b"\n")
            process.stdin.flush()
            in_time, _, _ = select.select([process.stdout], [], [], timeout_s)
            answer = process.stdout.readline() if in_time else b""
            out, err = (
                "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob(f"*.{end}")))
                for end in ("out", "err")
            )
        if not answer:
            self.kill()
            why = "warm_python.py has ended" if in_time else f"it has not ended in {timeout_s} s"
            raise RuntimeError(f"{arguments[:8]} gave no exit code: {why}.\n{out[-4000:]}\n{err[-8000:]}")
        codes = json.loads(answer)
        # Not that of a rank that was ended because of another.
        code = next((code for code in codes if code not in (0, -signal.SIGKILL)), min(codes))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def kill(self) -> None:
        """End it, and what of its programs has not ended."""
        if self._process is not None and self._process.poll() is None:
            rest = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for process in rest:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    python = WarmPython()
    yield python
    python.kill()


@pytest.fixture(scope="session")
def fresh_process(warm_python) -> Callable[..., subprocess.CompletedProcess]:
    """Runs Python on verl's CPU platform in a process of its own: verl resolves its platform once a process.

    Called with the interpreter's arguments; `fails` tells whether the exit code must differ from 0, `ranks` how many
    processes there are.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    path = os.pathsep.join([str(TESTS.parent), str(TESTS / "bench"), os.environ.get("PYTHONPATH", "")])
    settings = {"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"PYTHONFAULTHANDLER": "1"}  # a crash in a library says where it was

    def run(*args: str, fails: bool = False, ranks: int = 1, **env: str) -> subprocess.CompletedProcess:
        result = warm_python(*args, env=inherited | {"PYTHONPATH": path} | settings | env, ranks=ranks)
        assert (result.returncode != 0) == fails, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
        return result

    return run


@pytest.fixture(scope="session")
def fresh_json(fresh_process) -> Callable[..., Any]:
    """The last line that such a process prints, as JSON; called as `fresh_process`."""
    return lambda *args, **options: json.loads(fresh_process(*args, **options).stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def interpreting_python() -> Iterator[WarmPython]:
    """One in Triton's interpreter, which is chosen as Triton is imported."""
    python = WarmPython(TRITON_INTERPRET="1")
    yield python
    python.kill()


@pytest.fixture
def quick_starts(warm_python, monkeypatch) -> None:
    """Processes that this test starts have `WarmPython.quick`."""
    for name, value in warm_python.quick.items():
        monkeypatch.setenv(name, value)
