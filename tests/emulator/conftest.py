"""An emulated GPU, and small linears for it."""

import functools
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout import launch
from verl_qerl.kernels.rollout.w4a16_matmul import Adapter


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> Any:
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("the emulator needs g++ on x86-64")
    return load_beside(__file__, "emulator").Emulator(tmp_path_factory.mktemp("emulator"), multiprocessors=6)


@pytest.fixture
def gpu(emulator, monkeypatch) -> Iterator[Any]:
    """The emulator in the place of the driver; what torch.empty gives is full of NaN."""
    emulator.seed = 1
    emulator.install(monkeypatch)
    with load_beside(__file__, "emulator").uninitialized_is_nan():
        yield emulator


@pytest.fixture
def mutate(gpu, monkeypatch) -> Callable[..., None]:
    """Puts other text into the kernels' files from now on; None is as before."""
    read = Path.read_text

    def put(*changes: tuple[str, str]) -> None:
        found = dict.fromkeys(changes, 0)

        def changed(path: Path, *args: Any, **kwargs: Any) -> str:
            text = read(path, *args, **kwargs)
            if path.parent == Path(launch.__file__).parent and path.suffix in (".cu", ".cuh"):
                for change in changes:
                    found[change] += text.count(change[0])
                    text = text.replace(*change)
            return text

        monkeypatch.setattr(Path, "read_text", changed)
        gpu.install(monkeypatch)  # nothing compiled before is used again
        put.found = found

    return put


@pytest.fixture(scope="session")
def on_gpu() -> ModuleType:
    """What the tests of the kernel on a GPU build and assert."""
    return load_beside(str(Path(__file__).parents[1] / "kernels" / "rollout" / "unwritten.py"), "test_w4a16_matmul")


@pytest.fixture(scope="session")
def linear(on_gpu) -> Callable[..., tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Of K, columns of the members and a seed: tensors of `w4a16_matmul`, and the weight in float64."""
    return functools.partial(on_gpu.build, device="cpu")


@pytest.fixture(scope="session")
def adapter(on_gpu) -> Callable[..., Adapter]:
    """One that every second token has."""
    return functools.partial(on_gpu.build_adapter, device="cpu")
