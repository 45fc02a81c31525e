"""A Python that has imported the packages below verl, and runs each program in a fork of itself.

To import them takes four seconds of a core, and most programs of the tests need less than one for themselves. What is
tested, verl with its plugins and vLLM, is imported by every program anew, from where its PYTHONPATH says.

A line of standard input is {"arguments": [...], "cwd": ..., "output": <folder>, "environments": [...]}: a program and
its arguments, as Python takes them after its options, and the environment of each process to start.
When the processes have ended, a line of standard output gives their exit codes. One that fails ends the others.

What such a program starts in its turn can go on in a fork too: startup/sitecustomize.py asks for it at the socket that
is this program's argument.
"""

import atexit
import builtins
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

PACKAGES = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
    "tensordict",
    "datasets",
    "hydra",
    "torch._inductor.lowering",
    "torch._inductor.kernel",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "networkx",
    "mistral_common.protocol.instruct.request",
    "compressed_tensors.quantization",
)
WITH_RAY = ("transfer_queue", "ray.util")  # no process of Ray can have it: it reads the environment as it is imported


def wait(processes: list[int]) -> list[int]:
    """Exit codes as subprocess gives them."""
    codes = {}
    while len(codes) < len(processes):
        process, status = os.wait()
        codes[process] = os.waitstatus_to_exitcode(status)
        if codes[process]:
            for other in set(processes) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[process] for process in processes]


def import_found(names: Sequence[str]) -> None:
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.freeze()  # no collection goes through what is imported


def files_of(job: dict, index: int) -> list[int]:
    """Standard input, output and error of a process."""
    output = f"{job['output']}/{index}"
    flags = os.O_WRONLY | os.O_CREAT
    return [os.open(os.devnull, os.O_RDONLY), os.open(f"{output}.out", flags), os.open(f"{output}.err", flags)]


def prepare(program: str, cwd: str, environment: dict[str, str], files: Sequence[int], numbers: Sequence[int]) -> None:
    """Make this process one that was started with the program's environment, folder and open files."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, 1 + max(*files, *numbers)) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONFAULTHANDLER"):  # as Python does when it starts
        faulthandler.enable()
    if dynamo := sys.modules.get("torch._dynamo.config"):  # which read it when it was imported
        dynamo.disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    os.chdir(cwd)
    first = {"-c": "", "-m": os.getcwd()}.get(program, str(Path(program).parent))
    path = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *dict.fromkeys([*path, *sys.path])]
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR may be another one
    np.random.seed()  # as its import does; Python's own generator notices the fork


def execute(program: str, *arguments: str) -> None:
    """Run the program as this process's main module."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv[:] = [program, *arguments]
    if program == "-m":
        del sys.argv[1]
        runpy._run_module_as_main(arguments[0])  # what Python itself calls
    elif program == "-c":
        del sys.argv[1]
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        main.__file__ = program
        exec(compile(Path(program).read_text(encoding="utf-8"), program, "exec"), vars(main))


def leave(error: BaseException | None) -> NoReturn:
    """What Python does at the end of a program, except to take apart what was imported."""
    code = int(error is not None)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not code and error.code is not None:
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str], cwd: str, environment: dict[str, str], files: list[int], numbers: list[int]) -> NoReturn:
    try:
        prepare(arguments[0], cwd, environment, files, numbers)
        execute(*arguments)
    finally:
        leave(sys.exc_info()[1])


def serve() -> None:
    for line in sys.stdin:
        job, processes = json.loads(line), []
        for index, environment in enumerate(job["environments"]):
            process = os.fork()
            if process == 0:
                run(job["arguments"], job["cwd"], environment, files_of(job, index), [0, 1, 2])
            processes.append(process)
        print(json.dumps(wait(processes)), flush=True)


def lend(path: str) -> NoReturn:
    """Start a process for each that asks at this socket, until the parent has gone."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that mind
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    server.settimeout(1)
    while os.getppid() == parent:
        try:
            asker, _ = server.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            server.close()
            mind(asker)
        asker.close()
    os._exit(0)


def mind(asker: socket.socket) -> NoReturn:
    """Run what is asked for, pass signals on to it, and say how it ended; it ends with the process that asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asker.setblocking(True)
    _, files, _, _ = socket.recv_fds(asker, 1, 250)
    request = b""
    while not request.endswith(b"\n"):
        request += asker.recv(1 << 20)
    process = os.fork()
    if process == 0:
        asker.close()
        run(files=files, **json.loads(request))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(process)
    while ended not in select.select([asker, ended], [], [])[0]:
        number = asker.recv(1)
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    asker.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    gc.set_threshold(50_000)  # as startup/sitecustomize.py does
    import_found(PACKAGES)
    with contextlib.suppress(ImportError):  # vLLM has it
        import setproctitle

        setproctitle.getproctitle()  # looks for its place, which a fork with an environment of its own does not find
    if len(sys.argv) > 1 and os.fork() == 0:
        lend(sys.argv[1])
    import_found(WITH_RAY)
    serve()
    os._exit(0)
