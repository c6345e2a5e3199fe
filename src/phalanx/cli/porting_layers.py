"""Random numbers in layers of Keras, which on JAX come from a seed that the layer has."""

from __future__ import annotations

from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_tree import Mark, commented, dotted, full_name

__all__ = ["SeededLayers"]

_RANDOM = {
    f"tf.{module}.{name}": ours
    for module, names in {
        "random": {"normal": "normal", "uniform": "uniform"},
        "keras.backend": {"random_normal": "normal", "random_uniform": "uniform"},
    }.items()
    for name, ours in names.items()
}
"""Functions whose arguments those of `keras.random` have, too."""
_SEED = "seed_generator"
_REASON = (
    "on JAX a layer needs a seed of its own for random numbers: write a class with a "
    "keras.random.SeedGenerator"
)


class SeededLayers(cst.CSTTransformer):
    """Gives layers and models that draw random numbers in ``call`` a seed, and lets them use it.

    Marks functions in ``Lambda`` layers that draw, which have no place for a seed.
    """

    def __init__(self, module: cst.Module, aliases: dict[str, str]) -> None:
        super().__init__()
        self._aliases = aliases
        self._of_keras: set[str] = set()  # classes of the program
        self._drawing: list[set[str]] = []  # the methods that draw, of the classes around the code
        self._around: list[str] = []  # the classes and functions around the code
        self._in_lambdas = _in_lambdas(module, aliases)
        self.count = 0
        self.marks: list[Mark] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        """Look which methods ``call`` leads to."""
        bases = [full_name(b.value, self._aliases) or dotted(b.value) or "" for b in node.bases]
        is_layer = any(base.startswith("tf.keras") or base in self._of_keras for base in bases)
        if is_layer:
            self._of_keras.add(node.name.value)
        self._drawing.append(self._reached(node) if is_layer else set())
        self._around.append("class")

    def _reached(self, node: cst.ClassDef) -> set[str]:
        methods = {f.name.value: f for f in node.body.body if isinstance(f, cst.FunctionDef)}
        reached, rest = set[str](), ["call"]
        while rest:
            name = rest.pop()
            if name in reached or name not in methods:
                continue
            reached.add(name)
            own = m.Attribute(value=m.Name("self"))
            rest += [a.attr.value for a in m.findall(methods[name], own)]  # type: ignore[attr-defined]
        return {name for name in reached if self._draws(methods[name])}

    def _draws(self, node: cst.CSTNode) -> bool:
        called = (c.func for c in m.findall(node, m.Call()))  # type: ignore[attr-defined]
        return any((full_name(function, self._aliases) or "") in _RANDOM for function in called)

    def leave_ClassDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Give a layer that draws its seed."""
        self._around.pop()
        if not self._drawing.pop():
            return updated_node
        self.count += 1
        line = cst.parse_statement(f"self.{_SEED} = keras.random.SeedGenerator()")
        body = list(updated_node.body.body)
        for i, method in enumerate(body):
            if m.matches(method, m.FunctionDef(name=m.Name("__init__"))):
                lines = list(method.body.body)
                starts = [k for k, one in enumerate(lines) if _calls_base(one)]
                lines.insert(starts[0] + 1 if starts else len(lines), line)
                body[i] = method.with_changes(body=method.body.with_changes(body=lines))
                break
        else:
            made: Any = cst.parse_statement(
                "def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)\n"
            )
            inside = made.body.with_changes(body=[*made.body.body, line])
            at = next((i for i, s in enumerate(body) if isinstance(s, cst.FunctionDef)), len(body))
            body.insert(at, made.with_changes(body=inside))
            following = body[at + 1].with_changes(
                leading_lines=[cst.EmptyLine(indent=False), *body[at + 1].leading_lines]
            )
            body[at + 1] = following
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        """A function begins."""
        self._around.append(node.name.value)

    def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """A function ends; one that a ``Lambda`` layer calls has no seed."""
        self._around.pop()
        is_in_lambda = not self._around and original_node.name.value in self._in_lambdas
        if not is_in_lambda or not self._draws(original_node):
            return updated_node
        mark = Mark("tf.keras.layers.Lambda", _REASON)
        self.marks.append(mark)
        return commented(updated_node, [mark])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        """Draw with the layer's seed."""
        ours = _RANDOM.get(full_name(original_node.func, self._aliases) or "")
        inside = self._around[1] if self._around[:1] == ["class"] and self._around[1:] else None
        if ours is None or not self._drawing or inside not in self._drawing[-1]:
            return updated_node
        kept = [
            arg
            for i, arg in enumerate(updated_node.args)
            if (i < 4 if arg.keyword is None else arg.keyword.value not in ("seed", "name"))
        ]
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        seed = cst.Arg(cst.parse_expression(f"self.{_SEED}"), cst.Name("seed"), equal=equal)
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        kept = [arg.with_changes(comma=comma) for arg in kept]
        return cst.Call(cst.parse_expression(f"keras.random.{ours}"), [*kept, seed])


def _calls_base(statement: Any) -> bool:
    base = m.Call(func=m.Attribute(attr=m.Name("__init__")))
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(value=base)]))


def _in_lambdas(module: cst.Module, aliases: dict[str, str]) -> set[str]:
    """The functions that ``Lambda`` layers call."""
    return {
        arg.value.value
        for call in m.findall(module, m.Call())
        if isinstance(call, cst.Call) and full_name(call.func, aliases) == "tf.keras.layers.Lambda"
        for arg in call.args
        if isinstance(arg.value, cst.Name)
    }
