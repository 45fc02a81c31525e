"""`quantize` as a process: its arguments, its memory, and what an interrupt leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints.source import INDEX
from verl_qerl.cli.quantize.arguments import parse_size


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("700", 700)])
def test_shard_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["0", "5TB", "GB", "-1GB"])
def test_wrong_shard_sizes_are_refused(text: str, refused) -> None:
    assert "is no size" in refused("quantize", "--model", "m", "--out", "o", f"--max-shard-size={text}", code=2)


def _save_large(path: Path, num_layers: int, N: int, K: int) -> int:
    """A model of one linear a layer, one layer a shard; returns bytes."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    weight = torch.randn(N, K).bfloat16() * 0.02
    weight_map = {}
    for i in range(num_layers):
        name, file = f"model.layers.{i}.mlp.down_proj.weight", f"model-{i}.safetensors"
        save_file({name: weight}, path / file)
        weight_map[name] = file
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return num_layers * weight.nbytes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    _save_large(tmp_path / "bf16", num_layers=40, N=1024, K=1024)
    command = ["quantize", "--model", "bf16", "--out", "out", "--device", "cpu", "--scale", "minmax"]
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_qerl", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs, and so what they start, deaf to SIGINT.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob(".out*/*.safetensors")):  # the work has begun
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == code, stderr
    assert "interrupted; out was not written" in stderr
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == ["bf16"]


_PEAK = """
import re, sys
from pathlib import Path
from verl_qerl.cli.quantize.command import quantize_checkpoint

def peak():  # getrusage would count the parent's memory before exec
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak()
quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), device="cpu", scale="minmax")
print(peak() - before)
"""


def _peak_growth(folder: Path, num_layers: int) -> tuple[int, int]:
    """(bytes of the model, growth of the peak resident memory while it is quantized)."""
    folder.mkdir()
    # Of small linears: what is in work at once differs from run to run, by 20 MB with linears of 1 MB.
    size = _save_large(folder / "bf16", num_layers, N=64, K=2048)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", _PEAK, str(folder / "bf16"), str(folder / "out")]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return size, int(result.stdout) * 1024


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    small, peak_of_small = _peak_growth(tmp_path / "small", num_layers=80)
    large, peak_of_large = _peak_growth(tmp_path / "large", num_layers=1000)
    packed = (large - small) * 4.5 / 16
    assert packed > 60e6
    assert peak_of_large - peak_of_small < packed / 2  # neither the source nor its quantized form is held
