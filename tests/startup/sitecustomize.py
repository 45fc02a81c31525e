"""What every Python of tests/run.sh imports first.

To import verl or vLLM makes a million objects that stay, and Python's collector goes through them again and again, for
a fifth of the time of such an import. A run of verl makes ten.

Nor need processes of tests import what is below verl: where WARM_PYTHON is a socket of tests/warm_python.py, scripts of
tests, workers of Ray and what multiprocessing spawns go on in a fork of it, with their open files, environment and
folder. The process that was started waits for the fork, passes SIGTERM on, and ends as it does. One that begins a
session stays as it is: its group may be killed as a whole.
"""

import gc
import os
import sys

gc.set_threshold(50_000)


def run_in_a_fork(path: str, arguments: list[str]) -> None:
    """Ends the process when the fork has ended; returns where nothing listens at `path`."""
    import json
    import signal
    import socket

    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    numbers = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]  # not that of the list
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:
        return
    job = {"arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ), "numbers": numbers}
    socket.send_fds(server, [b"\n"], numbers)
    server.sendall(json.dumps(job).encode() + b"\n")
    signal.signal(signal.SIGTERM, lambda number, frame: server.sendall(bytes([number])))
    code = int(server.recv(16) or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def goes_on_elsewhere(arguments: list[str]) -> bool:
    if not arguments or os.getsid(0) == os.getpid():
        return False
    if arguments[0] == "-c":
        return not arguments[1].startswith("from multiprocessing.resource_tracker")
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    worker = os.path.join("ray", "_private", "workers", "default_worker.py")
    return arguments[0].endswith(worker) or os.path.abspath(arguments[0]).startswith(tests + os.sep)


if "WARM_PYTHON" in os.environ:
    started = [argument for argument in sys.orig_argv[1:] if argument not in ("-B", "-u")]
    if goes_on_elsewhere(started):
        run_in_a_fork(os.environ["WARM_PYTHON"], started)
