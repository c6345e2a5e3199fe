"""Recorded TensorFlow answers, and how ours are compared with them.

Each line of ``data/*.jsonl`` is one case: what was done, and what TensorFlow 2.21 answered. A case is
translated by a function registered with `case` (our answer must match), with `differs` (a deliberate
difference, described in docs/differences.md; the function asserts what we do instead), or it is listed
with `awaits` (it needs a part of the library that does not exist yet).
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px

DATA = Path(__file__).parent / "data"
DIFFERENCES_PAGE = Path(__file__).parents[2] / "docs" / "differences.md"

CASES: dict[str, Callable[[], Any]] = {}
DIFFERENCES: dict[str, Callable[[], None]] = {}
AWAITING: dict[str, str] = {}


def case(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a translation whose answer must match the recorded one."""
    return _register(CASES, names)


def cases(answers: Mapping[str, Callable[[], Any]]) -> None:
    """Register translations that are one expression each, by name."""
    for name, answer in answers.items():
        case(name)(answer)


def differs(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a check of what we deliberately do differently."""
    return _register(DIFFERENCES, names)


def awaits(what: str, *names: str) -> None:
    """List cases that need a part of the library that does not exist yet."""
    for name in names:
        AWAITING[name] = what


def _register(table: dict[str, Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names or (fn.__name__,):
            assert name not in table, f"{name} is registered twice"
            table[name] = fn
        return fn

    return add


def records(subject: str) -> list[dict[str, Any]]:
    """The recorded cases of one subject."""
    return [json.loads(line) for line in (DATA / f"{subject}.jsonl").read_text().splitlines()]


# -- what the cases use ------------------------------------------------------------------------


def mirrored(n: int, **kwargs: Any) -> px.MirroredStrategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(n)], **kwargs)


def rc() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def rid() -> Any:
    return rc().replica_id_in_sync_group


def frid() -> jax.Array:
    return rid().astype(jnp.float32)


def fresh(x: Any) -> jax.Array:
    """A new array object with the value of `x`: what tf.identity makes."""
    return jnp.array(x, copy=True)


def dist(strategy: px.Strategy, parts: list[Any]) -> Any:
    """A per-replica value from one part per replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def V(*parts: Any) -> list[jax.Array]:
    return [jnp.asarray(p) for p in parts]


def var(strategy: px.Strategy, value: Any, synchronization: Any, aggregation: Any) -> px.Variable:
    with strategy.scope():
        return px.Variable(value, synchronization=synchronization, aggregation=aggregation)


def comps(variable: px.Variable) -> list[np.ndarray[Any, Any]]:
    """The value of every copy."""
    return [v.numpy() for v in variable.values]


# -- comparing -----------------------------------------------------------------------------------


def encode(x: Any) -> Any:
    """Our answer in the encoding of the records."""
    if isinstance(x, px.Variable) and isinstance(x, px.DistributedValues):
        return {type(x).__name__: [encode(v) for v in x.values]}
    if isinstance(x, px.Variable):
        return encode(x.numpy())
    if isinstance(x, px.DistributedValues):
        return {type(x).__name__: [encode(v) for v in x.values]}
    if isinstance(x, px.IndexedSlices):
        return {"IndexedSlices": {"values": encode(x.values), "indices": encode(x.indices)}}
    if isinstance(x, px.PerReplicaSpec):
        return {"PerReplicaSpec": [encode(v) for v in x.value_specs]}
    if isinstance(x, px.TensorSpec):
        return {"TensorSpec": {"dtype": str(np.dtype(x.dtype)), "shape": list(x.shape)}}
    if isinstance(x, px.data.Ragged):
        return {"ragged": x.to_list()}
    if isinstance(x, np.ndarray) and x.dtype == object:
        return {"dtype": "string", "shape": list(x.shape), "value": [s.decode() for s in x.tolist()]}
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        host = np.asarray(x)
        return {"dtype": str(host.dtype), "shape": list(host.shape), "value": host.tolist()}
    if isinstance(x, enum.Enum):
        return f"{type(x).__name__}.{x.name}"
    if isinstance(x, tuple):
        return {"tuple": [encode(v) for v in x]}
    if isinstance(x, list):
        return [encode(v) for v in x]
    if isinstance(x, Mapping):
        return {k: encode(v) for k, v in x.items()}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    return {"object": type(x).__name__}


_NARROW = {"int64": "int32", "float64": "float32", "uint64": "uint32"}


def same(expected: Any, actual: Any) -> bool:
    """Whether an encoded answer means the same as the recorded one."""
    if isinstance(expected, dict) and {"dtype", "shape", "value"} <= set(expected):
        if not isinstance(actual, dict):  # a number where TensorFlow gives a scalar tensor
            return expected["shape"] == [] and same(expected["value"], actual)
        dtype = _NARROW.get(expected["dtype"], expected["dtype"])
        return (
            dtype == _NARROW.get(actual.get("dtype"), actual.get("dtype"))
            and expected["shape"] == actual["shape"]
            and same(expected["value"], actual["value"])
        )
    if isinstance(expected, dict) and set(expected) == {"dtype", "shape"}:
        dtype = _NARROW.get(expected["dtype"], expected["dtype"])
        return isinstance(actual, dict) and (dtype, expected["shape"]) == tuple(actual.values())
    if isinstance(expected, dict) and set(expected) == {"raises", "message"}:
        return isinstance(actual, dict) and expected["raises"] in actual.get("raises", ())
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and set(expected) == set(actual)
            and all(same(expected[k], actual[k]) for k in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(expected) == len(actual)
            and all(same(a, b) for a, b in zip(expected, actual, strict=True))
        )
    if expected == "nan":
        return isinstance(actual, float) and math.isnan(actual)
    if isinstance(expected, float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=2e-5, abs_tol=1e-5)
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    return expected == actual


def exception_type(name: str) -> type[BaseException]:
    """The exception that a recorded error must be compatible with."""
    import builtins

    return getattr(builtins, name, None) or getattr(px.errors, name)
