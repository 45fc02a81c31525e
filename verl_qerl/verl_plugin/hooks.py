"""Run something right after a module of verl has been imported.

Importing verl's engines or trainers while verl imports us would resolve its platform (and start nvidia-smi) in every
process, whether it needs them or not.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_waiting: dict[str, list[str]] = {}


def when_imported(name: str, then: str) -> None:
    """Import module `then` and call its `install(module)` once `name` is imported; at once if it already is.

    Args:
        then: A module with `install(module: ModuleType) -> None`, which may be called again.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        importlib.import_module(then).install(module)
        return
    if then not in _waiting.setdefault(name, []):
        _waiting[name].append(then)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for then in _waiting.get(self._name, []):
            importlib.import_module(then).install(module)
        _waiting.pop(self._name, None)  # not before: an import that is tried again after an error must install again
        if not _waiting:
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]

    def __getattr__(self, name: str) -> Any:  # the rest of the loader's protocol, e.g. get_source
        return getattr(self._loader, name)
