"""What is the same in programs that were traced apart: keys that are equal if it is."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from phalanx.execution.joint.rooms import kind
from phalanx.runtime import compat

HOST = (int, float, bool, complex, np.generic, np.ndarray)
"""Constants that a program may hold as they are."""

_SMALL = 1 << 16
_RULES = {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "fwd", "out_trees"}
"""Parameters of custom derivatives: functions, which are made anew whenever a program is traced."""


class Keys:
    """Makes keys, and remembers those of the programs that it has seen.

    Objects are told apart by their addresses, so they must outlive the keys.
    """

    def __init__(self) -> None:
        self._programs: dict[int, Any] = {}

    def of_constant(self, x: Any, aval: Any = None) -> Any:
        """The key of an array that a program holds, or of a value of the program around it."""
        if isinstance(x, HOST) or _is_readable(x):
            host = np.asarray(x)
            return "value", kind(host if aval is None else aval), _content(host)
        return "object", id(x)

    def of_parameters(self, eqn: Any) -> Any:
        """The key of what an equation does, apart from its operands."""
        items = sorted(eqn.params.items())
        if eqn.primitive.name.startswith("custom_"):
            items = [(name, x) for name, x in items if name not in _RULES]
        return eqn.primitive.name, tuple((name, self._of(x)) for name, x in items)

    def _of(self, x: Any) -> Any:
        if hasattr(x, "eqns") and hasattr(x, "invars"):
            constants = tuple(self.of_constant(c) for c in getattr(x, "consts", ()))
            return "program", self._of_program(getattr(x, "jaxpr", x)), constants
        if isinstance(x, dict):
            pairs = sorted(x.items(), key=lambda item: str(item[0]))
            return "dict", tuple((name, self._of(y)) for name, y in pairs)
        if isinstance(x, list | tuple):
            return type(x).__name__, tuple(self._of(y) for y in x)
        if isinstance(x, np.ndarray | jax.Array):
            return self.of_constant(x)
        if isinstance(x, float):
            return "float", x.hex()  # 0.0 == -0.0
        try:
            hash(x)
        except TypeError:
            return "object", id(x)
        return type(x).__name__, x

    def _of_program(self, jaxpr: Any) -> Any:
        if id(jaxpr) in self._programs:
            return self._programs[id(jaxpr)]
        numbers: dict[Any, int] = {}

        def number(atom: Any) -> Any:
            if compat.is_literal(atom):
                return self.of_constant(atom.val, atom.aval)
            return numbers.setdefault(atom, len(numbers))

        inputs = tuple((number(v), kind(v.aval)) for v in (*jaxpr.constvars, *jaxpr.invars))
        equations = tuple(
            (
                self.of_parameters(eqn),
                tuple(number(v) for v in eqn.invars),
                tuple((number(v), kind(v.aval)) for v in eqn.outvars),
            )
            for eqn in jaxpr.eqns
        )
        key = inputs, equations, tuple(number(v) for v in jaxpr.outvars)
        self._programs[id(jaxpr)] = key
        return key


def _is_readable(x: Any) -> bool:
    """Whether the values of an array are at hand and few."""
    if not isinstance(x, jax.Array) or compat.is_tracer(x) or compat.is_key_array(x):
        return False
    return x.is_fully_addressable and x.size <= _SMALL


def _content(host: np.ndarray[Any, Any]) -> bytes:
    data = host.tobytes()
    return data if len(data) <= 64 else hashlib.sha256(data).digest()
