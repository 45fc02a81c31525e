import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_qerl.formats import PackedWeight
from verl_qerl.formats.nvfp4 import nvfp4_weight

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
def interpreter(interpreting_python, tmp_path_factory) -> Callable[..., Any]:
    """Runs a program in Triton's interpreter: gets its arguments, `in.pt` and `out.pt` among them, gives what it saved.

    In a process of its own, so that none finds what another has imported or replaced.
    """

    def run(program: str, given: Any, *arguments: str) -> Any:
        folder = tmp_path_factory.mktemp("interpreter")
        torch.save(given, folder / "in.pt")
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = interpreting_python("-c", program, *arguments, env=env, cwd=folder)
        assert done.returncode == 0, done.stderr
        return torch.load(folder / "out.pt")

    return run


@pytest.fixture(scope="session")
def interpreted(interpreter) -> Callable[..., list[torch.Tensor]]:
    """Calls a module's `launch`, or another function, with each tuple of arguments, in Triton's interpreter."""

    def launch(module: str, cases: list[tuple], function: str = "launch") -> list[torch.Tensor]:
        return interpreter(SCRIPT, cases, module, "in.pt", "out.pt", function)

    return launch
