"""The shims of the CPU platform, each installed once verl has imported the module that it changes."""

from types import ModuleType

from verl_qerl import upstream
from verl_qerl.verl_plugin.shims import ENTROPY, PROCESS_GROUP

# Module of verl -> shim: what patches/verl/0002 and 0006 change.
SHIMS = {"verl.utils.distributed": PROCESS_GROUP, "verl.utils.torch_functional": ENTROPY}


def install(module: ModuleType) -> None:
    """Install the shim of a module, before an engine binds the function; raises as `upstream.install`."""
    upstream.install(SHIMS[module.__name__])
