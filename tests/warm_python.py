"""A Python that has imported the packages below verl, and runs each program in a fork of itself.

To import them takes four seconds of a core, and most programs of the tests need less than one for themselves. What is
tested, verl with its plugins and vLLM, is imported by every program anew, from where its PYTHONPATH says.

A line of standard input is {"arguments": [...], "cwd": ..., "output": <folder>, "environments": [...]}: a program and
its arguments, as Python takes them after its options, and the environment of each process to start.
When the processes have ended, a line of standard output gives their exit codes. One that fails ends the others.
"""

import atexit
import builtins
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import types
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
    "ray.util",
    "transfer_queue",
    "hydra",
)


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


def prepare(job: dict, index: int) -> None:
    """Make this process one that was started with the program's environment, folder and output."""
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{job['output']}/{index}.out", os.O_WRONLY | os.O_CREAT),
        (2, f"{job['output']}/{index}.err", os.O_WRONLY | os.O_CREAT),
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["environments"][index])
    os.chdir(job["cwd"])
    program = job["arguments"][0]
    first = {"-c": "", "-m": os.getcwd()}.get(program, str(Path(program).parent))
    path = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *dict.fromkeys([*path, *sys.path])]
    importlib.invalidate_caches()
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


def serve() -> None:
    for line in sys.stdin:
        job, processes = json.loads(line), []
        for index in range(len(job["environments"])):
            process = os.fork()
            if process == 0:
                try:
                    prepare(job, index)
                    execute(*job["arguments"])
                finally:
                    leave(sys.exc_info()[1])
            processes.append(process)
        print(json.dumps(wait(processes)), flush=True)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    gc.set_threshold(50_000)  # as startup/sitecustomize.py does
    for name in PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.freeze()  # no collection goes through what is imported
    serve()
    os._exit(0)
