"""Lets Hydra find `+rollout=nvfp4`.

The wheel installs this file as `hydra_plugins/verl_qerl_searchpath/__init__.py` (pyproject.toml, force-include),
the namespace Hydra scans for plugins. It must not import torch: Hydra loads it in every program that uses Hydra.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlQerlSearchPathPlugin(SearchPathPlugin):
    """Appends `verl_qerl/config` to the search path, after verl's own groups."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our folder; verl's own options keep their precedence."""
        search_path.append(provider="verl_qerl", path="pkg://verl_qerl.config")
