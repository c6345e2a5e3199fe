"""What the rewriting of programs is made of: dotted names, and marks for what a person must look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import libcst as cst

__all__ = ["PARTS_OF_KERAS", "Mark", "commented", "dotted", "full_name"]

PARTS_OF_KERAS = ("initializers", "losses", "metrics", "optimizers")
"""Modules of Keras that are also modules of TensorFlow."""


@dataclass(frozen=True)
class Mark:
    """Something that a person must look at."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def dotted(node: cst.BaseExpression | None) -> str | None:
    """A name with its dots; None if an expression is something else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return None if before is None else f"{before}.{node.attr.value}"
    return None


def full_name(node: Any, aliases: dict[str, str]) -> str | None:
    """The name of TensorFlow that an expression is."""
    path = dotted(node)
    if path is None:
        return None
    first, _, rest = path.partition(".")
    start = aliases.get(first)
    if start == "tf" and rest.split(".")[0] in PARTS_OF_KERAS and "." in rest:
        start = "tf.keras"
    return None if start is None else f"{start}.{rest}" if rest else start


def commented(node: Any, marks: Iterable[Mark]) -> Any:
    """A statement with marks over it."""
    lines = [cst.EmptyLine(comment=cst.Comment(f"# PORT: {mark}")) for mark in marks]
    return node.with_changes(leading_lines=[*node.leading_lines, *lines])
