"""The imports of a program: what its names of TensorFlow stand for, and what is imported instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_tree import PARTS_OF_KERAS, Mark, commented, dotted

__all__ = ["aliases_of", "bound_names", "with_imports"]

_LINES = {
    "glob": "import glob",
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "keras": "import keras",
    "np": "import numpy as np",
    "optax": "import optax",
    "os": "import os",
    "px": "import phalanx as px",
    "shutil": "import shutil",
}
_BACKEND = 'os.environ.setdefault("KERAS_BACKEND", "jax")'


def aliases_of(module: cst.Module) -> dict[str, str]:
    """The local names of parts of TensorFlow and Keras, with what they stand for.

    >>> aliases_of(cst.parse_module("import tensorflow as tf, os; from tensorflow.keras import layers"))
    {'tf': 'tf', 'layers': 'tf.keras.layers'}
    """
    found: dict[str, str] = {}
    for node in m.findall(module, m.Import() | m.ImportFrom()):
        if isinstance(node, cst.Import):
            for alias in node.names:
                path = dotted(alias.name) or ""
                first = path.split(".")[0]
                if first in ("tensorflow", "keras"):
                    local = alias.evaluated_alias
                    found[local or first] = _theirs(path if local else first)
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            path = dotted(node.module) or ""
            if path.split(".")[0] in ("tensorflow", "keras") and not node.relative:
                for alias in node.names:
                    local = alias.evaluated_alias or alias.evaluated_name
                    found[local] = _theirs(f"{path}.{alias.evaluated_name}")
    return found


def _theirs(path: str) -> str:
    """A name of TensorFlow as its documentation writes it."""
    first, _, rest = path.partition(".")
    rest = rest.removeprefix("compat.v2").removeprefix(".") if first == "tensorflow" else rest
    start = "tf" if first == "tensorflow" else "tf.keras"
    if start == "tf" and rest.split(".")[0] in PARTS_OF_KERAS:
        start = "tf.keras"
    return f"{start}.{rest}" if rest else start


def bound_names(node: cst.CSTNode) -> set[str]:
    r"""The names that a function, or a program, gives a meaning of its own; imports are none.

    >>> sorted(bound_names(cst.parse_module("import a; b = 1; (c, d) = e; f.g = 2")))
    ['b', 'c', 'd']
    """
    found = _Bound(node)
    node.visit(found)
    return found.names


class _Bound(cst.CSTVisitor):
    """Collects what is assigned in one function, and not in those inside."""

    def __init__(self, start: cst.CSTNode) -> None:
        super().__init__()
        self._start = start
        self.names: set[str] = set()

    def _target(self, node: Any) -> None:
        if isinstance(node, cst.Name):
            self.names.add(node.value)
        elif isinstance(node, cst.Tuple | cst.List):
            for element in node.elements:
                self._target(element.value)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Look at a node; go into it unless it is a function or a class inside."""
        if isinstance(node, cst.FunctionDef | cst.ClassDef) and node is not self._start:
            self.names.add(node.name.value)
            return False
        if isinstance(node, cst.Import | cst.ImportFrom):
            return False
        if isinstance(node, cst.Lambda | cst.GeneratorExp | cst.ListComp | cst.SetComp | cst.DictComp):
            return node is self._start
        if isinstance(node, cst.Param | cst.AsName):
            self._target(node.name)
        elif isinstance(
            node,
            cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.CompFor | cst.NamedExpr,
        ):
            self._target(node.target)
        return True


# -- new imports ---------------------------------------------------------------------------------


def with_imports(
    module: cst.Module, needed: set[str], keeps_tensorflow: bool
) -> tuple[cst.Module, list[Mark]]:
    """The program with the imports that it needs now in place of those of TensorFlow.

    Args:
        module: the program.
        needed: the first parts of its names, such as ``jnp``.
        keeps_tensorflow: whether some names of TensorFlow are left.

    Returns:
        The program, and marks at imports of libraries that are made for TensorFlow.
    """
    needed = needed | ({"px"} if "px." in module.code else set())
    body = list(module.body)
    at = _place(body)
    before = {line.strip() for line in cst.Module(body[:at]).code.splitlines()}
    present = {cst.Module([s.with_changes(leading_lines=())]).code.strip() for s in body}
    lines = sorted({_LINES[name] for name in needed if name in _LINES} - present)
    if "keras" in needed and not any("KERAS_BACKEND" in line for line in before):
        lines = [line for line in lines if line != _LINES["os"]]
        lines = [*([] if _LINES["os"] in before else [_LINES["os"]]), _BACKEND, *lines]
    new: list[Any] = [cst.parse_statement(line) for line in lines]
    if new and at < len(body) and _brings_tensorflow(body[at]):  # comments over it stay over its place
        new[0] = new[0].with_changes(leading_lines=body[at].leading_lines)
        body[at] = body[at].with_changes(leading_lines=())
    removing = _Imports(keeps_tensorflow)
    result = module.with_changes(body=[*body[:at], *new, *body[at:]]).visit(removing)
    return result, removing.marks


def _place(body: Sequence[Any]) -> int:
    """Where new imports go: to the first one of TensorFlow or Keras, or below the docstring."""
    for i, statement in enumerate(body):
        if _brings_tensorflow(statement):
            return i
    place = 0
    is_head = m.SimpleStatementLine(
        body=[
            m.Expr(value=m.SimpleString() | m.ConcatenatedString())
            | m.ImportFrom(module=m.Name("__future__"))
        ]
    )
    while place < len(body) and m.matches(body[place], is_head):
        place += 1
    return place


def _brings_tensorflow(statement: Any) -> bool:
    return any(
        _is_theirs(name, "keras")
        for part in (statement.body if isinstance(statement, cst.SimpleStatementLine) else ())
        for name in _modules(part)
    )


def _modules(node: Any) -> list[str]:
    if isinstance(node, cst.ImportFrom):
        return [dotted(node.module) or ""] if not node.relative else []
    return [dotted(alias.name) or "" for alias in node.names] if isinstance(node, cst.Import) else []


def _is_star(node: Any) -> bool:
    is_star = isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar)
    return is_star and any(map(_is_theirs, _modules(node)))


def _is_theirs(path: str, *more: str) -> bool:
    return path.split(".", maxsplit=1)[0] in ("tensorflow", *more)


class _Imports(cst.CSTTransformer):
    """Removes the imports of TensorFlow at all depths; other libraries for TensorFlow get a mark."""

    def __init__(self, keeps_tensorflow: bool) -> None:
        super().__init__()
        self._keeps = keeps_tensorflow
        self.marks: list[Mark] = []

    def leave_Module(self, original_node: Any, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        """The statements at the top."""
        return updated_node.with_changes(body=self._left(updated_node.body))

    def leave_IndentedBlock(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """The statements of a block; libcst writes `pass` if there are none."""
        return updated_node.with_changes(body=self._left(updated_node.body))

    def _left(self, statements: Sequence[Any]) -> list[Any]:
        result: list[Any] = []
        comments: list[Any] = []  # over lines that are no more
        for statement in statements:
            if not isinstance(statement, cst.SimpleStatementLine):
                result.append(statement)
                continue
            parts = [self._rest(part) for part in statement.body]
            kept = [part for part in parts if part is not None]
            over = [*comments, *statement.leading_lines]
            comments = []
            if not kept:
                comments = over if any(line.comment for line in over) else []
                continue
            kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            changed = statement.with_changes(body=kept, leading_lines=over)
            marks = [
                Mark(name, "a library for TensorFlow: it stays, and needs TensorFlow")
                for part in kept
                for name in _modules(part)
                if name.startswith("tensorflow_")
            ]
            marks += [
                Mark(f"{_modules(part)[0]}.*", "name what is imported: these names are not known")
                for part in kept
                if _is_star(part)
            ]
            self.marks += marks
            result.append(commented(changed, marks) if marks else changed)
        return result

    def _rest(self, node: Any) -> Any:
        """What is left of an import; None if nothing is."""
        if _is_star(node) or not any(map(_is_theirs, _modules(node))):
            return node
        if isinstance(node, cst.ImportFrom) and not self._keeps:
            return None
        if isinstance(node, cst.ImportFrom):
            return self._of_tensorflow(node)
        if self._keeps:
            return node
        names = [alias for alias in node.names if not _is_theirs(dotted(alias.name) or "")]
        if not names:
            return None
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(names=names)

    @staticmethod
    def _of_tensorflow(node: cst.ImportFrom) -> cst.ImportFrom | None:
        """What is imported besides parts of Keras, whose names were all replaced."""
        if isinstance(node.names, cst.ImportStar):
            return node
        path = dotted(node.module) or ""
        names = [
            a for a in node.names if not _theirs(f"{path}.{a.evaluated_name}").startswith("tf.keras")
        ]
        if not names:
            return None
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(names=names)
