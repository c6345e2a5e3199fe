"""Phalanx: the `tf.distribute` system on JAX.

Write a training step once; run it on one device, on many, or with central storage by changing one line.

A map of the package, from the bottom up; nothing imports what stands below it in this list:

* ``errors``       what Phalanx raises
* ``runtime``      the machine and the internals of JAX
* ``net``          how processes talk to each other
* ``cluster``      which tasks a cluster has
* ``job``          the processes of a job, their launcher and their hub
* ``core``         what things mean: contexts, values, variables, reductions, strategies
* ``data``         datasets, and how they reach the replicas
* ``execution``    how `Strategy.run` runs
* ``collectives``  how data moves between devices
* ``parameter_server``  variables that live in other processes
* ``strategies``   one file per strategy
* ``comm``         collectives between workers, and between replicas
* ``train``        optimizers, metrics and loops
* ``coordinator``  tasks that others give work to, and who gives it
* ``parallel``     plans that lay programs out over devices, and their search
* ``integrations``  other libraries under strategies
* ``testing``      what tests of distributed code need
* ``cli``          the ``phalanx`` command

Names load on first use, so that ``import phalanx`` costs next to nothing. Where they live stands in
``__init__.pyi``.
"""

import ast
import importlib
import os
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, tuple[str, str]]:
    """The module of each public name, and its name there."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in imports
        for alias in node.names
    }


def _prepare_cpu_devices() -> None:
    """Let XLA have enough threads for the CPU devices that the environment asks for.

    It reads their number when JAX starts, which may be long before the first strategy is created.
    """
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "XLA_FLAGS" not in os.environ:
        return
    if "jax" in sys.modules:
        from phalanx.runtime.devices import prepare_backend

        prepare_backend()
    else:
        from phalanx.runtime.cpu_pool import prepare_as_asked

        prepare_as_asked()


_prepare_cpu_devices()
_HOMES = _homes()

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if name.startswith("__"):  # which Python and its tools ask for
            raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
        from phalanx.runtime.spelling import no_such_name

        no_such_name("px", name, __all__)
    module, original = _HOMES[name]
    if module == "phalanx":
        return importlib.import_module(f"phalanx.{name}")
    value = globals()[name] = getattr(importlib.import_module(module), original)
    return value
