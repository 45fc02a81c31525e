"""Speed of `quantize` on this machine beside that of reading the same files.

    python tests/bench/bench_quantize.py --out tests/bench/results/<gpu>/quantize.json [--layers 4] [--dir DIR]

Writes a bf16 model with the linears of a 7B in shards of one layer under --dir, then reads and quantizes it, each from
a cold page cache (the files are dropped from it before every run) and from a warm one. The tests of reader, writer and
command run first; nothing is timed unless they pass.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import host_time
import result_file
import rollout_arms
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from verl_qerl.checkpoints.source import INDEX, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.formats import NVFP4
from verl_qerl.formats.nvfp4 import SCALE_CHOICES

ROOT = Path(__file__).parents[2]
GATES = ("tests/formats", "tests/checkpoints", "tests/cli/quantize/test_command_on_cpu.py")
LINEARS = rollout_arms.SHAPES["7B"].linears


def write_model(path: Path, num_layers: int) -> int:
    """A checkpoint of `num_layers` layers, one a shard; returns its bytes."""
    (path / "config.json").write_text("{}")
    weight_map: dict[str, str] = {}
    size = 0
    for i in range(num_layers):
        generator = torch.Generator().manual_seed(i)
        tensors = {
            f"model.layers.{i}.{name}.weight": torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
            for name, shape in LINEARS.items()
        }
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(3584, dtype=torch.bfloat16)
        save_file(tensors, path / f"model-{i:03d}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{i:03d}.safetensors")
        size += sum(tensor.nbytes for tensor in tensors.values())
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return size


def drop_from_cache(path: Path) -> None:
    os.sync()  # only clean pages can be dropped
    for file in path.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_plainly(path: Path) -> None:
    """As `dd bs=16M of=/dev/null`."""
    buffer = bytearray(16 << 20)
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def read_with_safetensors(path: Path, device: str) -> None:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt", device=device) as shard:
            for name in shard.keys():  # noqa: SIM118
                tensor = shard.get_tensor(name)
                tensor.sum() if device == "cpu" else None  # a mapped tensor is read when it is used
    host_time.synchronize()


def read_and_quantize(path: Path, device: str, scale: str) -> None:
    """What the actor and the vLLM loader do: nothing is written."""
    for _ in packed_stream(open_source(path), NVFP4(scale=scale), device=device):
        pass
    host_time.synchronize()


def gb_per_s(call: Callable[[], object], path: Path, size: int, repetitions: int) -> dict[str, float]:
    """Best of `repetitions`, from a cold and from a warm page cache."""
    result = {}
    for state in ("cold", "warm"):
        seconds = []
        for _ in range(repetitions):
            if state == "cold":
                drop_from_cache(path)
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        result[state] = round(size / 1e9 / min(seconds), 3)
    return result


def measure(folder: Path, num_layers: int, repetitions: int, scales: list[str]) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, out = folder / "bf16", folder / "out"
    model.mkdir()
    size = write_model(model, num_layers)

    def quantize(scale: str) -> None:
        shutil.rmtree(out, ignore_errors=True)
        quantize_checkpoint(model, out, scale=scale, device=device)

    def rate(call: Callable[[], object]) -> dict[str, float]:
        return gb_per_s(call, model, size, repetitions)

    return {
        "device": device,
        "bytes": size,
        "layers": num_layers,
        "shapes": LINEARS,
        "gb_per_s": {
            "plain read": rate(lambda: read_plainly(model)),
            "safetensors": rate(lambda: read_with_safetensors(model, device)),
            **{f"stream {it}": rate(lambda it=it: read_and_quantize(model, device, it)) for it in scales},
            **{f"quantize {it}": rate(lambda it=it: quantize(it)) for it in scales},
        },
    }


def gate_passes() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *GATES]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(result.stdout[-4000:], result.stderr[-2000:])
    return result.returncode == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--layers", type=int, default=4, help="0.47 GB each (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scales", nargs="+", choices=SCALE_CHOICES, default=list(SCALE_CHOICES))
    parser.add_argument("--dir", type=Path, help="on the disk to measure (default: that of temporary files)")
    args = parser.parse_args(argv)
    if not gate_passes():
        print("the tests did not pass on this machine: nothing is timed.")
        return 1
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(Path(folder), args.layers, args.repetitions, args.scales)
    report = result_file.header({"repetitions": args.repetitions})
    report |= {"cores": os.cpu_count(), "op": "quantize", **found}
    result_file.write(args.out, report)
    for name, rates in report["gb_per_s"].items():
        print(f"{name:24s} cold {rates['cold']:6.2f} GB/s, warm {rates['warm']:6.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
