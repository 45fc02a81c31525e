"""Install the shim of entropies once verl's functions on logits exist, before an engine binds one of them."""

from types import ModuleType

from verl_qerl import upstream
from verl_qerl.verl_plugin.shims import ENTROPY


def install(module: ModuleType) -> None:
    """Replace what patches/verl/0006 changes of entropies; stands down when that patch is applied.

    Raises:
        UpstreamDriftError: verl's function is not the one the shim was written for.
    """
    upstream.install(ENTROPY)
