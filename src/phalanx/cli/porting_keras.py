"""What is special about Keras: names that Keras 3 has given up, and models that must be lifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_tree import dotted, full_name

__all__ = [
    "compiles",
    "gone_from_models",
    "has_loop",
    "keras_call",
    "lifted_models",
    "with_new_name_of_rate",
]

_MODELS = ("tf.keras.Sequential", "tf.keras.Model", "tf.keras.models", "tf.keras.applications")
_RENAMED = (
    ("tf.keras.optimizers.", "lr", "learning_rate"),
    ("tf.keras.layers.InputLayer", "input_shape", "shape"),
)
"""Arguments that Keras 3 calls otherwise."""
_GONE = {
    "compiled_loss": "Keras 3 has self.compute_loss(y=…, y_pred=…), which adds the losses of layers; "
    "count it in self.metrics",
    "compiled_metrics": "Keras 3 has self.compute_metrics(x, y, y_pred), or update self.metrics",
}
_LISTS = m.Name("trainable_variables") | m.Name("trainable_weights")


def compiles(call: Any) -> bool:
    """Whether a call is that of a model's ``compile``."""
    method = m.Attribute(value=~m.Name("re"), attr=m.Name("compile"))
    return m.matches(call, m.Call(func=method))


def gone_from_models(node: cst.Attribute) -> str | None:
    """What to write for an attribute that models of Keras 3 do not have; None for others."""
    return _GONE.get(node.attr.value) if m.matches(node.value, m.Name("self")) else None


def has_loop(module: cst.Module, aliases: dict[str, str]) -> bool:
    """Whether a program runs steps on replicas, or on workers, by itself."""
    made = {
        dotted(node.targets[0].target)
        for node in m.findall(module, m.Assign(value=m.Call()))
        if isinstance(node, cst.Assign)
        and isinstance(node.value, cst.Call)
        and (full_name(node.value.func, aliases) or "").startswith("tf.distribute.")
    }
    for call in m.findall(module, m.Call(func=m.Attribute())):
        assert isinstance(call, cst.Call)
        assert isinstance(call.func, cst.Attribute)
        name, owner = call.func.attr.value, dotted(call.func.value) or ""
        if name == "experimental_run_v2":
            return True
        if name in ("run", "schedule") and (owner in made or "strategy" in owner.lower()):
            return True
    return False


def keras_call(full: str, call: cst.Call) -> cst.Call:
    """A call of Keras as Keras 3 has it.

    Args:
        full: the function's name in TensorFlow.
        call: the call, in which names have been replaced.
    """
    renamed = [(old, new) for start, old, new in _RENAMED if full.startswith(start)]
    for old, new in renamed:
        args = [
            a.with_changes(keyword=cst.Name(new)) if m.matches(a, m.Arg(keyword=m.Name(old))) else a
            for a in call.args
        ]
        return call.with_changes(args=args)
    if full == "tf.keras.backend.set_value" and len(call.args) == 2:
        variable, value = call.args
        return cst.Call(
            cst.Attribute(variable.value, cst.Name("assign")),
            [value.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)],
        )
    if full == "tf.keras.backend.get_value" and len(call.args) == 1:
        return cst.Call(cst.Attribute(call.args[0].value, cst.Name("numpy")))
    return call


def with_new_name_of_rate(node: cst.Attribute) -> cst.Attribute:
    """``optimizer.lr`` as ``optimizer.learning_rate``."""
    owner = dotted(node.value) or ""
    if node.attr.value == "lr" and owner.rpartition(".")[2].endswith("optimizer"):
        return node.with_changes(attr=cst.Name("learning_rate"))
    return node


def lifted_models(module: cst.Module, aliases: dict[str, str]) -> tuple[cst.Module, int]:
    """Lift the Keras models that a program with tapes differentiates or calls, where they are made.

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
        for found in m.findall(call, m.Attribute(attr=_LISTS)):
            assert isinstance(found, cst.Attribute)
            models |= {name for name in [dotted(found.value)] if name is not None}
    if models:
        models |= _called_models(module, aliases)
    others = _other_classes(module, aliases)
    lifting = _Lifting(models - {"self"}, others)
    return module.visit(lifting), lifting.count


def _called_models(module: cst.Module, aliases: dict[str, str]) -> set[str]:
    """The names of models that the program makes, and calls in functions."""

    def is_model(node: Any) -> bool:
        return (full_name(node, aliases) or "").startswith(_MODELS)

    makers = {
        node.name.value
        for node in m.findall(module, m.FunctionDef() | m.ClassDef())
        if isinstance(node, cst.FunctionDef | cst.ClassDef)
        and any(map(is_model, m.findall(node, m.Attribute() | m.Name())))
    }
    made = set()
    for node in m.findall(module, m.Assign(targets=[m.AssignTarget()], value=m.Call())):
        assert isinstance(node, cst.Assign)
        assert isinstance(node.value, cst.Call)
        maker, target = node.value.func, dotted(node.targets[0].target)
        known = is_model(maker) or (isinstance(maker, cst.Name) and maker.value in makers)
        if known and target is not None:
            made.add(target)
    functions = m.findall(module, m.FunctionDef() | m.Lambda())
    calls = [c.func for f in functions for c in m.findall(f, m.Call())]  # type: ignore[attr-defined]
    return made & {dotted(function) for function in calls}


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
        """Whether a statement gives a name a model; attributes may get an argument of a function."""
        given = m.Call() | m.Name() if "." in name else m.Call()
        made = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget()], value=given)])
        if not m.matches(statement, made) or dotted(statement.body[0].targets[0].target) != name:
            return False
        value = statement.body[0].value
        maker = value.func if isinstance(value, cst.Call) else None
        return not (isinstance(maker, cst.Name) and maker.value in self._others)


def _adds(statement: Any, name: str) -> bool:
    """Whether a statement adds to a model, or builds it."""
    call = m.Call(func=m.Attribute(attr=m.Name("add") | m.Name("build")))
    if not m.matches(statement, m.SimpleStatementLine(body=[m.Expr(value=call)])):
        return False
    return dotted(statement.body[0].value.func.value) == name
