"""Keras models in loops of one's own: where a rewritten program must lift them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_tree import full_name

__all__ = ["lifted_models"]

_MODELS = ("tf.keras.Sequential", "tf.keras.Model", "tf.keras.models", "tf.keras.applications")
_LISTS = m.Name("trainable_variables") | m.Name("trainable_weights")


def lifted_models(module: cst.Module, aliases: dict[str, str]) -> tuple[cst.Module, int]:
    """Lift the Keras models whose variables a program differentiates, where they are made.

    Args:
        module: the program, in which tapes have been rewritten, and names have not.
        aliases: the local names of TensorFlow.

    Returns:
        The program, and how many models it lifts.
    """
    nodes = m.findall(module, m.Attribute() | m.Name())
    used = [full_name(node, aliases) or "" for node in nodes]
    if not any(name.startswith(_MODELS) for name in used):
        return module, 0
    steps = m.Call(
        func=m.Attribute(value=m.Name("px"), attr=m.Name("value_and_grad") | m.Name("values_and_grads"))
    )
    models: set[str] = set()
    for call in m.findall(module, steps):
        for found in m.findall(call, m.Attribute(value=m.Name(), attr=_LISTS)):
            assert isinstance(found, cst.Attribute)
            assert isinstance(found.value, cst.Name)
            models.add(found.value.value)
    others = _other_classes(module, aliases)
    lifting = _Lifting(models - {"self"}, others)
    return module.visit(lifting), lifting.count


def _other_classes(module: cst.Module, aliases: dict[str, str]) -> set[str]:
    """Classes of the program that are modules of TensorFlow, and no Keras models."""
    return {
        node.name.value
        for node in m.findall(module, m.ClassDef())
        if isinstance(node, cst.ClassDef)
        and any(full_name(base.value, aliases) == "tf.Module" for base in node.bases)
    }


class _Lifting(cst.CSTTransformer):
    """Puts a line after the statements that make a model, unless a function gives it to its caller."""

    def __init__(self, models: set[str], others: set[str]) -> None:
        super().__init__()
        self._models, self._others = models, others
        self._returned: list[set[str]] = []  # by the functions around the code
        self.count = 0

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        """A function begins."""
        found = m.findall(node, m.Return(value=m.Name()))
        self._returned.append({r.value.value for r in found})  # type: ignore[attr-defined]

    def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """A function ends."""
        self._returned.pop()
        return updated_node

    def leave_IndentedBlock(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Lift the models that a block makes."""
        return updated_node.with_changes(body=self._lifted(updated_node.body))

    def leave_Module(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Lift the models that are made at the top."""
        return updated_node.with_changes(body=self._lifted(updated_node.body))

    def _lifted(self, statements: Sequence[Any]) -> list[Any]:
        body = list(statements)
        given_away = set().union(*self._returned)
        for name in sorted(self._models - given_away):
            if not any(self._makes(s, name) for s in body):
                continue
            self.count += 1
            last = max(i for i, s in enumerate(body) if self._makes(s, name) or _adds(s, name))
            body.insert(last + 1, cst.parse_statement(f"{name} = px.keras.lift({name})"))
        return body

    def _makes(self, statement: Any, name: str) -> bool:
        target = m.AssignTarget(target=m.Name(name))
        made = m.SimpleStatementLine(body=[m.Assign(targets=[target], value=m.Call())])
        if not m.matches(statement, made):
            return False
        function = statement.body[0].value.func
        return not (isinstance(function, cst.Name) and function.value in self._others)


def _adds(statement: Any, name: str) -> bool:
    """Whether a statement adds to a model, or builds it."""
    method = m.Attribute(value=m.Name(name), attr=m.Name("add") | m.Name("build"))
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(value=m.Call(func=method))]))
