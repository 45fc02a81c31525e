"""Install the shim of the process group once verl's distributed helpers exist."""

from types import ModuleType

from verl_qerl import upstream
from verl_qerl.verl_plugin.shims import PROCESS_GROUP


def install(module: ModuleType) -> None:
    """Replace what patches/verl/0002 changes; stands down when that patch is applied.

    Raises:
        UpstreamDriftError: verl's function is not the one the shim was written for.
    """
    upstream.install(PROCESS_GROUP)
