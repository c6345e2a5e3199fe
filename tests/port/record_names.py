"""Writes the names of `tf.distribute`, `tf.data` and `tf.function`: ``python record_names.py > FILE``.

Run it with an interpreter that has TensorFlow. The names are those that its modules export; of classes,
also their public members, unless they come from Python itself.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

ROOTS = {
    "tf.distribute": tf.distribute,
    "tf.data": tf.data,
    "tf.function": tf.function,
    "tf.types.experimental.distributed": tf.types.experimental.distributed,
}
CLASSES_OF_FUNCTIONS = {
    "tf.types.experimental.PolymorphicFunction": tf.types.experimental.PolymorphicFunction,
    "tf.types.experimental.ConcreteFunction": tf.types.experimental.ConcreteFunction,
}


def members(path: str, kind: type) -> Iterator[str]:
    python = [base for base in kind.__mro__ if base.__module__ in ("builtins", "enum")]
    own = {name for base in python for name in vars(base)}
    yield from (f"{path}.{name}" for name in dir(kind) if not name.startswith("_") and name not in own)


def names(path: str, value: Any, seen: set[str]) -> Iterator[str]:
    if path in seen:
        return
    seen.add(path)
    if isinstance(value, types.ModuleType):
        for name in dir(value):
            if not name.startswith("_"):
                yield from names(f"{path}.{name}", getattr(value, name), seen)
        return
    yield path
    if inspect.isclass(value):
        yield from members(path, value)


def main() -> None:
    found: set[str] = set()
    seen: set[str] = set()
    for path, value in (ROOTS | CLASSES_OF_FUNCTIONS).items():
        found |= set(names(path, value, seen))
    sys.stdout.write(f"# TensorFlow {tf.__version__}\n")
    sys.stdout.write("\n".join(sorted(found)) + "\n")


if __name__ == "__main__":
    main()
