import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.nvfp4 import nvfp4_weight

# A line of standard input is a program, its arguments and a file for its errors; the answer is its exit code. It runs
# in a fork, so that none finds what another has imported or replaced.
SERVER = """
import json
import os
import sys
import traceback
import torch
import triton.language

for line in sys.stdin:
    program, sys.argv[1:], errors = json.loads(line)
    if (process := os.fork()) == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
# Outputs are born as NaN, so that an element that no program writes is seen.
SCRIPT = """
import importlib
import sys
import torch

launch = getattr(importlib.import_module(sys.argv[1]), sys.argv[4])
empty = torch.empty

def poisoned(*args, **kwargs):
    out = empty(*args, **kwargs)
    return out.fill_(float("nan")) if out.is_floating_point() else out

torch.empty = poisoned
torch.save([launch(*case) for case in torch.load(sys.argv[2])], sys.argv[3])
"""


@pytest.fixture(scope="session")
def every_byte() -> PackedWeight:
    """[127, 512]: every finite, non-negative E4M3 byte, subnormals too, times every byte of two codes."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    return nvfp4_weight(codes, scale, torch.tensor(2.0**-12))


@pytest.fixture
def compile_cuda(tmp_path) -> Callable[[str], str]:
    """Compiles CUDA C++ for Hopper; returns what the compiler says."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")

    def compile(source: str) -> str:
        path = tmp_path / "kernel.cu"
        path.write_text(source)
        command = [
            nvcc,
            "-arch=sm_90a",
            "-cubin",
            "-Xptxas",
            "-v",
            "-Werror",
            "all-warnings",
            "-o",
            str(tmp_path / "out"),
        ]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return compile


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory) -> Iterator[Callable[..., Any]]:
    """Runs a program in Triton's interpreter: gets its arguments, `in.pt` and `out.pt` among them, gives what it saved.

    The variable that starts the interpreter acts on import, hence in another process: one for all programs, which takes
    seconds to import torch and Triton.
    """
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(program: str, given: Any, *arguments: str) -> Any:
            folder = tmp_path_factory.mktemp("interpreter")
            torch.save(given, folder / "in.pt")
            files = {name: str(folder / name) for name in ("in.pt", "out.pt", "errors")}
            job = [program, [files.get(argument, argument) for argument in arguments], files["errors"]]
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            assert server.stdout.readline() == "0\n", (folder / "errors").read_text()
            return torch.load(folder / "out.pt")

        yield run
        server.stdin.close()


@pytest.fixture(scope="session")
def interpreted(interpreter) -> Callable[..., list[torch.Tensor]]:
    """Calls a module's `launch`, or another function, with each tuple of arguments, in Triton's interpreter."""

    def launch(module: str, cases: list[tuple], function: str = "launch") -> list[torch.Tensor]:
        return interpreter(SCRIPT, cases, module, "in.pt", "out.pt", function)

    return launch
