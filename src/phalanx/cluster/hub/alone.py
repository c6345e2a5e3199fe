"""Runs `phalanx.cluster.hub.process` without the rest of Phalanx, which takes long to import.

This file is run by its path. The package `phalanx` is then an empty one that only knows its folder.
"""

import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Import no more than the hub, and serve."""
    package = ModuleType("phalanx")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["phalanx"] = package
    from phalanx.cluster.hub.process import serve

    serve()


if __name__ == "__main__":
    main()
