"""CUDA C++ kernels, compiled by NVRTC on first use and launched through the driver.

torch compiles and loads them; its own launch has neither clusters whose size is chosen at launch nor programmatic
dependent launch.

In a CUDA graph a kernel is launched while the one before it still runs, as soon as all blocks of that one have called
`start_next` of grid.cuh, which says what a kernel may do before `await_inputs`.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

_CLUSTER, _PDL = 4, 6  # CU_LAUNCH_ATTRIBUTE_: CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION
_UNSIGNED = {1: 0, 2: 1, 8: 4}  # CUtensorMapDataType by bytes
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # of CUtensorMapSwizzle and CUtensorMapL2promotion

programmatic_launch = True  # dependent launch in CUDA graphs; tests turn it off, and see the same bits


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Kernel:
    """One kernel of a compiled source, by its name, extern "C"."""

    def __init__(self, source: str, name: str) -> None:
        # "a": wgmma exists for this architecture alone.
        self._kernel = torch.cuda._compile_kernel(source, name, compute_capability="90a")
        self._shared_bytes = 0

    def __call__(self, grid: int, block: int, args: list[Any], shared_bytes: int = 0, cluster: int = 1) -> None:
        """Launch on the current stream.

        Args:
            grid: Thread blocks; 0, of no rows, launches nothing.
            block: Threads of each.
            args: Tensors, of which the kernel gets the address, ints, numbers of ctypes and what `tensor_map` gives.
        """
        if grid == 0:
            return
        if shared_bytes > self._shared_bytes:
            # 48 KiB need no leave, but with what the kernel declares itself; for less torch asks for none.
            self._shared_bytes = max(shared_bytes, 48 << 10)
            self._kernel.set_shared_memory_config(self._shared_bytes)
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attributes = _attributes(cluster)
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config((grid, 1, 1), (block, 1, 1), shared_bytes, stream, attributes, len(attributes))
        error = _driver().cuLaunchKernelEx(ctypes.byref(config), self._kernel.func, pointers, None)
        if error:
            raise RuntimeError(f"a kernel did not start: CUDA error {error}, grid {grid}, {shared_bytes} bytes shared.")


def _attributes(cluster: int) -> Any:
    attributes = [_Attribute(_CLUSTER)]
    attributes[0].value[:3] = (cluster, 1, 1)
    # Outside of a graph the host is slower than what this gains, and weights may be written just before.
    if programmatic_launch and torch.cuda.is_current_stream_capturing():
        attributes.append(_Attribute(_PDL))
        attributes[1].value[0] = 1
    return (_Attribute * len(attributes))(*attributes)


def _value(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    return ctypes.c_int(arg) if isinstance(arg, int) else arg


def tensor_map(matrix: torch.Tensor, element_bytes: int, block: tuple[int, int], swizzle: bool = False) -> Any:
    """How the copy engine reads blocks of a matrix into shared memory; zeros beyond its end.

    Args:
        matrix: [rows, columns], contiguous, aligned to 16 bytes, as are its rows.
        element_bytes: 1, 2 or 8, which count as one column.
        block: Rows and columns of a block, up to 256 each.
        swizzle: The 128-byte swizzle, as wgmma reads it.

    Returns:
        A CUtensorMap, for a kernel's argument.
    """
    rows = matrix.shape[0]
    columns = matrix.shape[1] * matrix.element_size() // element_bytes
    return _encode(matrix.data_ptr(), element_bytes, (columns, rows), block[::-1], swizzle)


@functools.lru_cache(maxsize=4096)
def _encode(address: int, element_bytes: int, size: tuple[int, int], block: tuple[int, int], swizzle: bool) -> Any:
    room = (ctypes.c_uint8 * (128 + 64))()
    at = (ctypes.addressof(room) + 63) // 64 * 64  # where the driver wants it
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _UNSIGNED[element_bytes],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(*size),
        (ctypes.c_uint64 * 1)(size[0] * element_bytes),
        (ctypes.c_uint32 * 2)(*block),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128 if swizzle else 0,
        _PROMOTE_256,
        0,
    )
    if error:
        raise RuntimeError(f"no tensor map: CUDA error {error}, columns and rows {size}, blocks {block}.")
    return (ctypes.c_uint64 * 16).from_buffer_copy((ctypes.c_uint64 * 16).from_address(at))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def read_source(*names: str, **defines: int) -> str:
    """The files of this package, one after the other, below macros of these values."""
    here = Path(__file__).parent
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return macros + "\n".join((here / name).read_text(encoding="utf-8") for name in names)
