"""A program in a fork of warm_python.py does what it does as a process of Python."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STARTUP = Path(__file__).parents[1] / "startup"

PROGRAMS = {
    "returns": "print(sys.argv, __name__, globals().get('__file__'), __spec__ is None)",
    "fails": "1 / 0",
    "exits": "sys.exit(7)",
    "exits with a message": "sys.exit('a sentence')",
    "dies": "os.kill(os.getpid(), 11)",
    "leaves threads and an exit function": (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')"
    ),
    "imports": "import verl_qerl\nprint(verl_qerl.__file__, os.environ['PYTHONPATH'], os.getcwd(), sys.path[0])",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("form", ["-c", "-m", "script"])
def test_it_is_as_in_a_process_of_its_own(warm_python, tmp_path, form, name):
    source = f"import os, sys\n{PROGRAMS[name]}\n"
    (tmp_path / "program.py").write_text(source)
    arguments = {"-c": ["-c", source], "-m": ["-m", "program"], "script": [str(tmp_path / "program.py")]}[form]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found = warm_python(*arguments, "argument", env=env, cwd=tmp_path)
    command = [sys.executable, *arguments, "argument"]
    expected = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_rank_that_fails_ends_the_others(warm_python, tmp_path):
    program = "import os, sys, time\nsys.exit('ends first') if os.environ['RANK'] == '1' else time.sleep(600)"
    found = warm_python("-c", program, env=dict(os.environ), cwd=tmp_path, ranks=2)
    assert (found.returncode, found.stderr) == (1, "ends first\n")


def test_a_crash_says_where_it_was(warm_python, tmp_path):
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}
    found = warm_python("-c", "import os\ndef here():\n    os.kill(os.getpid(), 11)\nhere()", env=env, cwd=tmp_path)
    assert found.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in found.stderr
    assert "in here" in found.stderr


def test_what_is_tested_is_not_imported_beforehand(warm_python, tmp_path):
    program = "import sys\nprint([name for name in ('verl', 'verl_qerl', 'vllm') if name in sys.modules])"
    assert warm_python("-c", program, env=dict(os.environ), cwd=tmp_path).stdout == "[]\n"


def asking(source: str) -> list[str]:
    """A command whose process asks for a fork, if WARM_PYTHON says where."""
    return [sys.executable, "-c", f"import os, sys\nsys.path.remove({str(STARTUP)!r})\n{source}\n", "argument"]


@pytest.fixture
def environment(quick_starts, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STARTUP), *(path for path in sys.path if path)]))
    return dict(os.environ)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_that_goes_on_in_a_fork_is_as_any(environment, tmp_path, name):
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "input": "what it reads"}
    command = asking(PROGRAMS[name] + "\nprint(sys.stdin.read())")
    found = subprocess.run(command, env=environment, **options)
    expected = subprocess.run(command, env=environment | {"WARM_PYTHON": "nobody listens"}, **options)
    expected.stdout = expected.stdout.replace("nobody listens", environment["WARM_PYTHON"])
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_it_goes_on_where_torch_is_imported_and_ray_is_not(environment):
    command = asking("print(*('torch' in sys.modules, 'ray' in sys.modules, os.getppid()))")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    torch, ray, parent = process.communicate()[0].split()
    assert (torch, ray) == ("True", "False")
    assert int(parent) != os.getpid()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGKILL, -signal.SIGKILL)])
def test_signals_reach_the_fork(environment, number, code):
    source = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    command = asking(source + "print(os.getpid(), flush=True)\ntime.sleep(600)")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    fork = psutil.Process(int(process.stdout.readline()))
    assert fork.pid != process.pid
    process.send_signal(number)
    assert process.wait(60) == code
    psutil.wait_procs([fork], timeout=60)
    assert not fork.is_running()
