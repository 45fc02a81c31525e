"""What verl lacks and a wrapper can supply. Each shim stands down once its patch in patches/ is applied."""

from collections.abc import Callable

from verl_qerl.upstream import Shim


def _gloo_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Name the CPU once: verl's default backend on a CPU platform is "cpu:gloo,cpu:gloo", which torch refuses."""

    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name  # listing the shims must not import verl

        if backend is None and get_device_name() == "cpu":
            backend = "gloo"
        original(timeout_second=timeout_second, backend=backend)

    return initialize_global_process_group_ray


SHIMS: tuple[Shim, ...] = (
    Shim(
        target="verl.utils.distributed:initialize_global_process_group_ray",
        versions="==0.9.1",
        fingerprint="761a94d1a2e0",
        patched="75c43fbe0859",
        patch="verl/0002",
        wrap=_gloo_on_cpu,
    ),
)
