import os
import shutil
import subprocess
import sys
from collections.abc import Callable

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
def interpreted(tmp_path_factory):
    """Calls a module's `launch`, or another function, with each tuple of arguments, in Triton's interpreter.

    In a process of its own: the variable that starts the interpreter acts on import.
    """

    def launch(module: str, cases: list[tuple], function: str = "launch") -> list[torch.Tensor]:
        folder = tmp_path_factory.mktemp("interpreter")
        torch.save(cases, folder / "in.pt")
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, module, str(folder / "in.pt"), str(folder / "out.pt"), function]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return torch.load(folder / "out.pt")

    return launch
