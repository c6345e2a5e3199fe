"""Programs that are to be planned: traced, with a name for each argument and result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import compat


@dataclass(frozen=True)
class Traced:
    """A traced program.

    Args:
        closed: its jaxpr.
        names: the names of its inputs.
        results: the names of its outputs.
        parameters: the numbers of the inputs that are trained.
    """

    closed: Any
    names: tuple[str, ...]
    results: tuple[str, ...]
    parameters: frozenset[int]


def trace(program: Any, args: Sequence[Any], parameters: int | Sequence[int]) -> Traced:
    """Trace a function, or name the inputs of one that is traced already.

    Args:
        program: a function, or what `jax.make_jaxpr` returned.
        args: its arguments; anything with a shape and a dtype will do for an array.
        parameters: the numbers of the arguments that are trained, as `jax.grad` counts them. For a
            jaxpr, the numbers of its inputs.
    """
    chosen = (parameters,) if isinstance(parameters, int) else tuple(parameters)
    if hasattr(program, "jaxpr") and hasattr(program, "consts"):
        count = len(program.jaxpr.invars)
        _check(chosen, count)
        outs = range(len(program.jaxpr.outvars))
        return Traced(
            program,
            tuple(f"arg{i}" for i in range(count)),
            tuple(f"output{i}" for i in outs),
            frozenset(i % count for i in chosen),
        )
    if not callable(program):
        raise InvalidTypeError(f"A function or a closed jaxpr is needed. Received: {program!r}.")
    args = tuple(args)
    _check(chosen, len(args))
    trained = {i % len(args) for i in chosen} if args else set()
    closed, results = compat.jaxpr_and_result(program, *args)
    unknown = [v.aval for v in closed.jaxpr.invars if not all(isinstance(n, int) for n in v.aval.shape)]
    if unknown:
        raise InvalidValueError(
            f"A plan needs the sizes of all dims. Give arguments of one size. Received: {unknown[0]}."
        )
    names: list[str] = []
    numbers: set[int] = set()
    for i, (arg, prefix) in enumerate(zip(args, _argument_names(program, len(args)), strict=True)):
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]:
            inner = keystr(path, simple=True, separator="/")
            if i in trained:
                numbers.add(len(names))
            plain = i in trained and len(trained) == 1
            names.append("/".join(part for part in ("" if plain and inner else prefix, inner) if part))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(results)[0]]
    out_names = [
        "/".join(x for x in ("output", keystr(p, simple=True, separator="/")) if x) for p in paths
    ]
    return Traced(closed, _distinct(names, out_names), tuple(out_names), frozenset(numbers))


def _check(chosen: Sequence[int], count: int) -> None:
    if any(not -count <= i < count for i in chosen):
        raise InvalidValueError(
            f"The program has {count} arguments, of which `parameters` are the numbers of the trained "
            f"ones. Received: parameters={tuple(chosen)}."
        )


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first arguments of a function, as far as it tells."""
    try:
        found = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        found = []
    return [found[i] if i < len(found) else f"arg{i}" for i in range(count)]


def _distinct(names: Sequence[str], taken: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number behind those that occurred before."""
    seen = set(taken)
    found = []
    for name in names:
        unique, number = name, 1
        while unique in seen:
            unique, number = f"{name}_{number}", number + 1
        seen.add(unique)
        found.append(unique)
    return tuple(found)
