"""Lets every worker of a job keep compiled programs, for many jobs of one program.

JAX lets the first process only, and the programs of another CPU device have another key.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

from jax._src import compiler

_first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
_write = compiler._cache_write
compiler._cache_write = FunctionType(_write.__code__, {**vars(compiler), "distributed": _first})
