import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch

from verl_qerl.nvfp4.format import PackedWeight


@pytest.fixture(scope="session")
def every_byte() -> PackedWeight:
    """[127, 512]: every finite, non-negative E4M3 byte, subnormals too, times every byte of two codes."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    return PackedWeight(codes, scale, torch.tensor(2.0**-12))


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
