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


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


_DEVICE_MODULE = _DeviceModule(
    is_available=lambda: False,
    current_device=lambda: "cpu",
    device_count=lambda: 1,
    get_device_name=lambda *args: "CPU",
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    reset_peak_memory_stats=_nothing,
    memory_allocated=_zero,
    memory_reserved=_zero,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    mem_get_info=lambda *args: (0, 0),
    get_rng_state=lambda *args: torch.get_rng_state(),
    set_rng_state=lambda state, *args: torch.set_rng_state(state),
)


class PlatformCPU(PlatformBase):
    """Device `cpu`, collectives by gloo, weight transfer through shared memory."""

    device_name = property(lambda self: "cpu")  # type: ignore[assignment]
    vendor_name = property(lambda self: "cpu")  # type: ignore[assignment]
    device_module = property(lambda self: _DEVICE_MODULE)  # type: ignore[assignment]

    # There is one device, on which nothing runs asynchronously; no caching allocator, profiler, NCCL or CUDA runtime.
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = get_collective_module = cudart = _nothing

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never by detection: a driver without a GPU may well steer a cluster that has some."""
        return False

    def current_device(self) -> Any:
        """`cpu`, which `.to()` takes in the place of an index."""
        return "cpu"

    def device_count(self) -> int:
        """One device a process."""
        return 1

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """A CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """The collectives' backend."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable Ray sets; nothing reads it here."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        """No profiler."""
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        """The name verl's resource pools count."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """The variable that keeps Ray from changing the visible devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No CUDA IPC: verl sends weights through shared memory."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """No variables are needed."""
        return {}


def register() -> None:
    """Make `VERL_PLATFORM=cpu` known to verl."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
