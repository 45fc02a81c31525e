"""A platform of verl for machines without an accelerator.

Ray gives out accelerators by a resource named GPU; here it is a plain count (`+platform=cpu` sets it), so that verl's
resource pools work unchanged.
"""

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _DeviceModule(types.SimpleNamespace):
    """torch.cpu with the memory and device queries that verl expects of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _always(answer: Any) -> Any:
    """A function or method that takes anything and gives the same answer."""
    return lambda *args, **kwargs: answer


_nothing = _always(None)
_DO_NOTHING = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
_ARE_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_DEVICE_MODULE = _DeviceModule(
    **dict.fromkeys(_DO_NOTHING, _nothing),
    **dict.fromkeys(_ARE_ZERO, _always(0)),
    is_available=_always(False),
    current_device=_always("cpu"),
    device_count=_always(1),
    get_device_name=_always("CPU"),
    mem_get_info=_always((0, 0)),
    get_rng_state=lambda *args: torch.get_rng_state(),
    set_rng_state=lambda state, *args: torch.set_rng_state(state),
)


class PlatformCPU(PlatformBase):
    """Device `cpu`, collectives by gloo, weight transfer through shared memory."""

    device_name = property(_always("cpu"))  # type: ignore[assignment]
    vendor_name = property(_always("cpu"))  # type: ignore[assignment]
    device_module = property(_always(_DEVICE_MODULE))  # type: ignore[assignment]

    # There is one device, on which nothing runs asynchronously; no caching allocator, profiler, NCCL or CUDA runtime.
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
    nvtx_range = _always(contextlib.nullcontext())
    is_available = _always(True)
    is_platform_available = _always(False)  # a driver without a GPU may well steer a cluster that has some
    current_device = _always("cpu")  # which `.to()` takes in the place of an index
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")  # Ray sets it, and nothing reads it here
    ray_resource_name = _always("GPU")  # what verl's resource pools count
    ray_noset_envvars = _always(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    is_ipc_supported = _always(False)

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


def register() -> None:
    """Make `VERL_PLATFORM=cpu` known to verl."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
