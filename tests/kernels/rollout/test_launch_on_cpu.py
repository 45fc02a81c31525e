"""What of a launch needs no GPU: the source, the driver's structures, and what a tensor map is told of a matrix."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from verl_qerl.kernels.rollout import launch


def test_macros_come_before_the_files():
    source = launch.read_source("decode.cuh", "ring.cuh", TOKENS=8, ONE=1)
    assert source.startswith("#define TOKENS 8\n#define ONE 1\n")
    assert 0 < source.index("struct Factors") < source.index("struct Ring")


def test_the_structures_are_as_large_as_the_driver_s():
    assert ctypes.sizeof(launch._Attribute) == 72
    assert ctypes.sizeof(launch._Config) == 56
    assert launch._Config.stream.offset == 32


@pytest.mark.parametrize("capturing", [False, True])
def test_kernels_start_early_in_a_graph_alone(monkeypatch, capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    attributes = launch._attributes(6)
    assert [(one.id, *one.value[:3]) for one in attributes] == [(4, 6, 1, 1), (6, 1, 0, 0)][: 1 + capturing]
    monkeypatch.setattr(launch, "programmatic_launch", False)
    assert [one.id for one in launch._attributes(1)] == [4]


def test_no_blocks_are_no_launch(monkeypatch):
    monkeypatch.setattr(launch, "_driver", lambda: pytest.fail("launched"))
    launch.Kernel.__new__(launch.Kernel)(0, 128, [torch.zeros(0, 8)])


def test_shared_memory_is_asked_for_where_what_a_kernel_declares_may_exceed_what_all_have(monkeypatch):
    asked = []
    kernel = launch.Kernel.__new__(launch.Kernel)
    kernel._shared_bytes = 0
    kernel._kernel = SimpleNamespace(func=None, set_shared_memory_config=asked.append)
    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *arguments: 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    for shared_bytes in (0, 48736, 49152, 60000, 50000):
        kernel(1, 128, [], shared_bytes)
    assert asked == [49152, 60000]  # torch asks the driver for nothing below


class Driver:
    """Writes the arguments of cuTensorMapEncodeTiled down, and bytes into the map."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def cuTensorMapEncodeTiled(self, at, kind, rank, address, size, pitch, block, strides, *rest):  # noqa: N802
        self.aligned = at.value % 64 == 0
        self.given = (kind, rank, address.value, tuple(size), tuple(pitch), tuple(block), tuple(strides), rest)
        ctypes.memset(at.value, 7, 128)
        return self.error


@pytest.fixture
def driver(monkeypatch):
    def put(error: int = 0) -> Driver:
        found = Driver(error)
        monkeypatch.setattr(launch, "_driver", lambda: found)
        launch._encode.cache_clear()
        return found

    yield put
    launch._encode.cache_clear()


def test_a_matrix_is_described_in_its_columns_first(driver):
    found = driver()
    x = torch.zeros(17, 128, dtype=torch.bfloat16)
    made = launch.tensor_map(x, 2, (32, 64), swizzle=True)
    assert bytes(made) == b"\7" * 128
    assert found.aligned
    assert found.given == (1, 2, x.data_ptr(), (128, 17), (256,), (64, 32), (1, 1), (0, 3, 3, 0))


def test_two_words_may_count_as_one_column(driver):
    found = driver()
    words = torch.zeros(8, 512, dtype=torch.int32)
    launch.tensor_map(words, 8, (4, 256))
    assert found.given[0] == 4
    assert found.given[3:6] == ((256, 8), (2048,), (256, 4))
    assert found.given[-1] == (0, 0, 3, 0)


def test_what_the_driver_refuses_is_an_error(driver):
    driver(error=1)
    with pytest.raises(RuntimeError, match=r"no tensor map: CUDA error 1, columns and rows \(128, 4\)"):
        launch.tensor_map(torch.zeros(4, 128, dtype=torch.bfloat16), 2, (8, 64))
