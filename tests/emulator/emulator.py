"""Runs the CUDA C++ kernels of verl_qerl.kernels on a CPU, in a random order of threads that a seed gives.

It takes the place of the driver and of torch's compiler, so all that prepares a launch is what a GPU gets.
"""

import contextlib
import ctypes
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout import attention, elementwise, launch, low_rank, rotation, w4a16_matmul

translate = load_beside(__file__, "cuda_to_cpp").translate

HERE = Path(__file__).parent
MACHINE = ("schedule.cpp", "grids.cpp", "memory.cpp", "tensor_core.cpp")
# Registers of a wgmma are read late: what lies in them must not be given to another variable.
FLAGS = ["-std=c++20", "-fPIC", "-shared", f"-I{HERE}"]
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-fstack-reuse=none"]
_PDL, _CLUSTER, _SWIZZLE_128 = 6, 4, 3
_ELEMENT_BYTES = {0: 1, 1: 2, 4: 8}  # by CUtensorMapDataType
_MAGIC = 0xBA881E55BA881E55


class EmulationError(RuntimeError):
    """What a GPU would do is not defined, or it would do nothing for ever."""


class _Code(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("bind", "run", "drop")]


class Emulator:
    """A GPU, and the driver's functions for it.

    Args:
        folder: Where compiled sources lie; one that another emulator left there is not compiled again.
        multiprocessors: Of the GPU: how many thread blocks run at the same time.
        seed: Of the order in which threads run, copies end and kernels start; each run takes the next one.
    """

    def __init__(self, folder: Path, multiprocessors: int = 6, seed: int = 0) -> None:
        self.folder, self.multiprocessors, self.seed = folder, multiprocessors, seed
        self.capturing = False
        sources = "".join((HERE / name).read_text() for name in (*MACHINE, "machine.h", "device.h"))
        library = self._build(sources, [str(HERE / name) for name in MACHINE], "-O2", "-ftree-vectorize")
        self._machine = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._machine.emu_run.restype = ctypes.c_char_p
        self._machine.emu_run.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self._machine.emu_launch.argtypes = [_Code, ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_int] * 5]
        self._machine.emu_steps.restype = ctypes.c_uint64
        self._machine.emu_launch.restype = None
        self._keeps: list[Any] = []

    @property
    def steps(self) -> int:
        """How often a thread was continued in the last run."""
        return self._machine.emu_steps()

    def _build(self, key: str, sources: list[str], *options: str) -> Path:
        name = hashlib.sha256("\0".join([key, *options, *FLAGS]).encode()).hexdigest()[:20]
        library = self.folder / f"{name}.so"
        if not library.exists():
            compiler = shutil.which("g++")
            if compiler is None:
                raise FileNotFoundError("no g++ on PATH, and the emulator is compiled by it. Install g++.")
            made = library.with_suffix(".tmp")
            command = [compiler, *FLAGS, *options, "-o", str(made), *sources]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise EmulationError(f"g++ does not compile {sources}: {done.stderr[:4000]}")
            made.rename(library)
        return library

    def compile(self, source: str, name: str, **_: Any) -> Any:
        """As torch.cuda._compile_kernel: a kernel for `Kernel` of kernels/rollout/launch.py."""
        text = translate(source, name)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.cpp"
        path.write_text(text)
        header = (HERE / "device.h").read_text()
        made = getattr(ctypes.CDLL(str(self._build(text + header, [str(path)], "-O1", "-w"))), f"code_of_{name}")
        made.restype = _Code
        return SimpleNamespace(func=(made(), name), set_shared_memory_config=lambda shared_bytes: None)

    def cuTensorMapEncodeTiled(self, at, kind, rank, address, size, pitch, box, strides, *rest) -> int:  # noqa: N802
        """Of the driver, for two dimensions; `memory.cpp` says what it writes."""
        swizzled = int(rest[1] == _SWIZZLE_128)
        fields = (address.value, _ELEMENT_BYTES[kind], *size, *pitch, *box, swizzled, _MAGIC)
        (ctypes.c_uint64 * 16).from_address(at.value)[: len(fields)] = fields
        wrong = rank != 2 or address.value % 16 or pitch[0] % 16 or max(box) > 256 or tuple(strides) != (1, 1)
        return int(bool(wrong))

    def cuLaunchKernelEx(self, config, func, arguments, extra) -> int:  # noqa: N802
        """Of the driver: while a graph is captured the kernel waits for the end of that, else it runs now."""
        of, (code, name) = config._obj, func
        attributes = {one.id: list(one.value) for one in of.attributes[: of.num_attributes]}
        cluster, early = attributes[_CLUSTER][0], int(_PDL in attributes)
        if of.grid[0] % cluster or of.shared_bytes > 227 << 10 or of.block[0] > 1024 or of.block[0] % 32:
            return 1
        shape = (of.grid[0], of.block[0], of.shared_bytes, cluster, early)
        self._machine.emu_launch(code, name.encode(), ctypes.cast(arguments, ctypes.c_void_p), *shape)
        if not self.capturing:
            self.run()
        return 0

    def run(self) -> None:
        """Run what was launched.

        Raises:
            EmulationError: A deadlock, or what is not allowed.
        """
        seed, self.seed = self.seed, self.seed + 1
        error = self._machine.emu_run(seed, self.multiprocessors)
        if error:
            raise EmulationError(f"{error.decode()} (seed {seed})")

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Kernels launched inside start early, as in a CUDA graph, and run at its end."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
        self.run()

    def install(self, monkeypatch: Any) -> None:
        """Be the GPU of verl_qerl.kernels, for tensors of a CPU."""
        monkeypatch.setattr(torch.cuda, "_compile_kernel", functools.cache(self.compile))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(launch, "_driver", lambda: self)
        for module in (attention, w4a16_matmul):
            monkeypatch.setattr(module, "count_multiprocessors", lambda device: self.multiprocessors)
        launch._encode.cache_clear()
        for module in (attention, elementwise, low_rank, rotation, w4a16_matmul):
            for made in vars(module).values():
                if hasattr(made, "cache_clear") and getattr(made, "__module__", "") == module.__name__:
                    made.cache_clear()


@contextlib.contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """What torch.empty gives is full of NaN meanwhile."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
