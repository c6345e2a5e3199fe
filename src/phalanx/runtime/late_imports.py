"""Libraries that take part in strategies once they are imported, before or after Phalanx.

Entering a strategy's scope is the first moment at which it matters whether Keras is there: what is made
in scopes is distributed. So nothing is watched before that, `import phalanx` costs nothing, and nothing
here imports such a library.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _keras() -> None:
    importlib.import_module("phalanx.integrations.keras.installing").install()


LIBRARIES: dict[str, Callable[[], None]] = {"keras": _keras}
"""What to do once a library is there, by its name."""

_lock = threading.Lock()
_waiting = dict(LIBRARIES)


def notice() -> None:
    """Let libraries that are imported take part, and those that will be as soon as they are."""
    if not _waiting:
        return
    with _lock:
        there = {name: _waiting.pop(name) for name in list(_waiting) if name in sys.modules}
        if _waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    for join in there.values():
        join()


class _Finder(MetaPathFinder):
    """Finds the libraries as Python does, and hears of it when they have been loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Heard(spec.loader)
        return spec


class _Heard(Loader):
    """Loads a library, which then takes part."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        join = _waiting.pop(module.__name__, None)
        if join is not None:
            join()
